"""Whatever a store or a blend does wrong costs time: the answer is plain vLLM's, and a metric says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend_rag import PromptBuilder
from tests.vllm.conftest import HangingStore
from tests.vllm.serving import Served, ask_of, assert_same


def test_a_blend_that_fails_ends_in_plain_prefill(
    plain: Served, faulty: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[18:21], question="What is a module?")
    faulty.ask(ask_of(layout, warm=True), tokens=1)
    ids, params = ask_of(layout, ratio=0.0)
    params["segments"] = [[*entry, "fail"] if entry[0] == "chunk" else entry for entry in params["segments"]]
    before = faulty.metrics().get("blend_rag_requests failed", 0)
    [found] = faulty.ask((ids, params))
    assert_same(found, plain.ask(layout.token_ids)[0])
    assert "injected" in found.report["error"]
    assert faulty.metrics()["blend_rag_requests failed"] == before + 1


def test_a_store_that_hangs_and_one_that_is_gone(
    plain: Served, faulty: Served, prompts: PromptBuilder, texts: list[str], hanging_store: HangingStore
) -> None:
    layout = prompts.build(passages=texts[21:24], question="What is a module?")
    [expected] = plain.ask(layout.token_ids)
    [found] = faulty.ask(ask_of(layout, ratio=0.0))
    assert_same(found, expected)  # all chunks are new, so nothing is approximated even at r = 0
    assert set(found.report["misses"]) <= {"store too slow", "store unreachable"}
    hanging_store.close()
    layout = prompts.build(passages=texts[24:27], question="What is a module?")
    [found] = faulty.ask(ask_of(layout, ratio=0.0))
    assert_same(found, plain.ask(layout.token_ids)[0])
    misses = [name for name in faulty.metrics() if name.startswith("blend_rag_misses store")]
    assert misses


def test_a_torn_object_is_computed_again(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str], store_folder: Path
) -> None:
    layout = prompts.build(passages=texts[56:58], question="What is a module?")
    server.ask(ask_of(layout, warm=True), tokens=1)
    for i in range(6):  # push it out of memory
        other = prompts.build(passages=[texts[i]], question="x")
        server.ask(ask_of(other, warm=True), tokens=1)
    for file in store_folder.rglob("*.safetensors"):
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
    [found] = server.ask(ask_of(layout, ratio=0.0))
    assert found.report["misses"] == {"torn file": 2}
    assert_same(found, plain.ask(layout.token_ids)[0])
    assert server.metrics()["blend_rag_misses torn file"] >= 2


@pytest.mark.parametrize(
    "params",
    [
        {"segments": [["prefix", 3], ["chunk", 10**9]]},
        {"segments": [["chunk", 1]] * 5000},
        {"segments": [["chunk", -4], ["question", 8]]},
        {"segments": [["nonsense", 4]]},
        {"segments": "all of it"},
        {"segments": [["chunk", True], ["question", 3]]},
        {"namespace": "somebody else's", "window": 32},
        {"window": 0},
        {"warm": True},
        {"window": 32, "ratio": 7},
        {"window": 32, "selector": "oracle"},
        {"segments": [["prefix", 4], ["chunk", 90]], "context_ids": ["x"]},
    ],
)
def test_parameters_that_do_not_add_up_are_refused(
    plain: Served, faulty: Served, texts: list[str], prompts: PromptBuilder, params: dict
) -> None:
    ids = prompts.tokenizer.literal(texts[27])
    before = faulty.metrics().get("blend_rag_requests refused", 0)
    [found] = faulty.ask((ids, params))
    assert_same(found, plain.ask(ids)[0])
    assert faulty.metrics()["blend_rag_requests refused"] == before + 1
