"""The examples run, and the blended query engine differs from the plain one in three lines."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def code(name: str) -> list[str]:
    """Lines of an example without imports, blank lines and its docstring."""
    lines = (EXAMPLES / name).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith(("from ", "import ", '"""'))]


def test_three_lines_make_a_plain_query_engine_blend() -> None:
    plain, blended = code("llamaindex_plain.py"), code("llamaindex_blend.py")
    changes = [line for line in difflib.ndiff(plain, blended) if line[0] in "+-"]
    assert sum(line[0] == "+" for line in changes) <= 3
    assert sum(line[0] == "-" for line in changes) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llamaindex_plain.py", "llamaindex_blend.py"])
def test_both_query_engines_answer(name: str) -> None:
    shown = run(name)
    assert shown.count("\nWhat does the") == 2
    answers = [answer.partition("?\n")[2] for answer in shown.split("\nWhat does the")[1:]]
    assert all(len(answer.split()) > 3 for answer in answers)


@pytest.mark.slow
def test_the_application_warms_once(tmp_path: Path) -> None:
    first, second = (run("llamaindex_rag.py", f"file://{tmp_path}/kv") for _ in range(2))
    for shown in (first, second):
        assert shown.count("misses: none") == 3
    reused = [int(line.split(" reused")[0].split()[-1]) for line in second.splitlines() if " reused" in line]
    assert min(reused) > 300


@pytest.mark.slow
def test_the_notebook_runs_and_shows_plot_and_tokens() -> None:
    import jupytext
    import nbclient

    notebook = jupytext.read(EXAMPLES / "notebooks" / "llamaindex_ttft.py")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": EXAMPLES / "notebooks"}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}, "the plot"
    coloured = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("background:#c9e7cb" in page for page in coloured), "the coloured view of reused tokens"
    assert any("median speed-up" in output.get("text", "") for output in outputs)
