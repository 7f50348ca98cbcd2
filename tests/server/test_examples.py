"""The examples over a server run and show what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import KEY
from tests.server.processes import VLLMServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_application_answers_and_warms_once(server: VLLMServer) -> None:
    shown = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "vllm_rag.py"), server.url],
            capture_output=True,
            text=True,
            check=False,
            cwd=EXAMPLES,
            env={**os.environ, "VLLM_API_KEY": KEY},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        shown.append(done.stdout)
    assert "smollm2: 0 passages computed" in shown[1]
    assert shown[1].count(" reused (") == 2
    assert "chunk" not in shown[1].split("reused (")[1].split("first token")[1], "no chunk is missed"


def test_the_notebook_shows_a_plot_and_the_tokens(server: VLLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import jupytext
    import nbclient

    monkeypatch.setenv("BLEND_RAG_SERVER", server.url)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    notebook = jupytext.read(EXAMPLES / "notebooks" / "vllm_ttft.py")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES / "notebooks"}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds, "the plot"
    coloured = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("background:#c9e7cb" in page for page in coloured), "the coloured view of reused tokens"
    assert sum("blended" in output.get("text", "") for output in outputs) >= 1
