"""Little room: prefills split over steps, blends over tiles, requests preempted; answers stay the same."""

from __future__ import annotations

import pytest

from blend_rag import PromptBuilder
from tests.vllm.serving import Served, ask_of, assert_same


def test_a_prompt_that_chunked_prefill_splits(
    plain: Served, cramped: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    for question in ("What is a loop?", "What is a condition?"):
        layout = prompts.build(passages=texts[0:6], question=question)
        assert len(layout) > 2 * 256
        [expected] = plain.ask(layout.token_ids)
        [split] = cramped.ask(layout.token_ids)
        assert_same(split, expected)
        [found] = cramped.ask(ask_of(layout, ratio=1.0))
        assert_same(found, expected)
        cramped.settle()


@pytest.mark.parametrize("selector", ["query-guided", "k-deviation", "first-k"])
def test_tiles_change_nothing(
    server: Served, cramped: Served, prompts: PromptBuilder, texts: list[str], selector: str
) -> None:
    layout = prompts.build(passages=texts[0:6], question="Why?")
    for engine in (server, cramped):
        engine.ask(ask_of(layout, warm=True), tokens=1)
    found = [
        engine.ask(ask_of(layout, ratio=0.6, selector=selector))[0] for engine in (server, cramped)
    ]  # 0.6 of 600 tokens are more than a step of 256 takes
    assert found[0].report["recomputed"] == found[1].report["recomputed"]
    assert_same(found[0], found[1])


def test_preempted_requests_are_blended_again(
    plain: Served, cramped: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layouts = [
        prompts.build(passages=[texts[(i + j) % 6] for j in range(4)], question=f"What is number {i}?")
        for i in range(5)
    ]
    expected = plain.ask(*[layout.token_ids for layout in layouts], tokens=100)
    found = cramped.ask(*[ask_of(layout, ratio=1.0) for layout in layouts], tokens=100)
    assert cramped.metrics()["num_preemptions"] > 0
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_aborted_requests_leave_nothing_behind(
    plain: Served, cramped: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    from vllm import SamplingParams

    engine = cramped.llm.llm_engine
    layouts = [prompts.build(passages=texts[10 + i : 15 + i], question="Which?") for i in range(4)]
    for number, layout in enumerate(layouts):
        ids, params = ask_of(layout)
        sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
        engine.add_request(f"gone-{number}", {"prompt_token_ids": list(ids)}, sampling)
    engine.step()
    engine.abort_request([f"gone-{number}" for number in range(4)])
    while engine.has_unfinished_requests():
        engine.step()
    layout = prompts.build(passages=texts[3:6], question="Which one?")
    [found] = cramped.ask(ask_of(layout, ratio=1.0))
    assert_same(found, plain.ask(layout.token_ids)[0])


def test_a_chunk_larger_than_host_memory_is_computed_every_time(
    plain: Served, cramped: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    passage = "\n".join(texts[20:29])  # about 900 tokens, 20 MB of KV
    for question in ("What?", "Why?"):
        layout = prompts.build(passages=[passage], question=question)
        [found] = cramped.ask(ask_of(layout, ratio=0.0))
        assert found.report["misses"] == {"never warmed": 1}
        assert_same(found, plain.ask(layout.token_ids)[0])
        cramped.settle()
