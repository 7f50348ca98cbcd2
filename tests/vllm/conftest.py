"""Engines shared by the tests of this folder. A start takes a quarter of a minute: at most ten in all."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels are tested without a GPU

import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from pydoc_data import topics

import pytest

from blend_rag import PromptBuilder
from tests.vllm.serving import Served

CHUNK_TOKENS = 100


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the packaged SmolLM2-135M-Instruct, converted on first use."""
    from blend_rag.engines.loading import resolve_model

    return resolve_model(None)


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> PromptBuilder:
    """Prompts with a short prefix."""
    from transformers import AutoTokenizer

    return PromptBuilder(AutoTokenizer.from_pretrained(smollm2), system="Answer from the passages.")


@pytest.fixture(scope="session")
def texts(prompts: PromptBuilder) -> list[str]:
    """Passages of real text, each of about `CHUNK_TOKENS` tokens."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = prompts.tokenizer.literal(text)
    return [prompts.tokenizer.decode(ids[at : at + CHUNK_TOKENS]) for at in range(0, 60 * CHUNK_TOKENS, CHUNK_TOKENS)]


@pytest.fixture(scope="session")
def plain(smollm2: Path) -> Iterator[Served]:
    """VLLM without the connector: what is right."""
    with closing(Served(smollm2)) as served:
        yield served


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="session")
def server(smollm2: Path, store_folder: Path) -> Iterator[Served]:
    """The connector with a tier for one chunk where the model runs, one for five in host memory, and a disk."""
    chunk_bytes = 30 * 2 * CHUNK_TOKENS * 3 * 64 * 2
    served = Served(
        smollm2,
        {
            "store": f"file://{store_folder}",
            "gpu_bytes": int(1.5 * chunk_bytes),
            "host_bytes": int(5.5 * chunk_bytes),
            "separator": "<chunk-border>",
        },
    )
    with closing(served):
        yield served


@pytest.fixture(scope="session")
def embedded(smollm2: Path, texts: list[str]) -> dict:
    """What the embedded engine makes of one prompt, by selector; its environment is named by BLEND_RAG_PYTHON."""
    python = os.environ.get("BLEND_RAG_PYTHON")
    if not python:
        pytest.skip("BLEND_RAG_PYTHON names no environment with the embedded engine")
    task = {
        "model": str(smollm2),
        "system": "Answer from the passages.",
        "passages": texts[30:33],
        "question": "What is a keyword?",
        "selectors": ["query-guided", "first-k", "k-deviation", "v-deviation"],
        "tokens": 8,
    }
    script = Path(__file__).with_name("embedded_answer.py")
    done = subprocess.run(
        [python, str(script)], input=json.dumps(task), capture_output=True, text=True, check=True, timeout=300
    )
    found: dict = json.loads(done.stdout)
    return found


class HangingStore:
    """A server that takes connections and never answers, until it is closed."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}/0?deadline=0.5&put_deadline=0.5"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="session")
def hanging_store() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.close()


@pytest.fixture(scope="session")
def faulty(smollm2: Path, hanging_store: HangingStore) -> Iterator[Served]:
    """A connector that misbehaves on request, before a store that hangs."""
    served = Served(
        smollm2,
        {
            "kv_connector": "FaultyConnector",
            "kv_connector_module_path": "tests.vllm.faulty",
            "store": hanging_store.url,
            "allow_unsigned": True,
            "load_timeout": 1.0,
        },
    )
    with closing(served):
        yield served


@pytest.fixture(scope="session")
def cramped(smollm2: Path) -> Iterator[Served]:
    """Small steps, few pages, no prefix caching: prefills are split, requests preempted."""
    served = Served(
        smollm2,
        {"host_bytes": "20MB"},
        max_num_batched_tokens=256,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
    )
    with closing(served):
        yield served
