"""At r = 1 a blended request equals vLLM without the connector, wherever its KV comes from."""

from __future__ import annotations

from typing import Any

import pytest

from blend_rag import PromptBuilder
from blend_rag.layout import SegmentKind
from tests.vllm.serving import Served, ask_of, assert_same

LONG_SYSTEM = "Answer from the passages. " * 45  # more than a page and worth reading from pages


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0, 3)])
def test_any_order_of_chunks(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str], order: tuple[int, ...]
) -> None:
    for question in ("What is an identifier?", "What is a class?"):  # new, then stored
        layout = prompts.build(passages=[texts[i] for i in order], question=question)
        [expected] = plain.ask(layout.token_ids)
        [found] = server.ask(ask_of(layout, ratio=1.0))
        assert_same(found, expected)
        assert found.report["exact"]
        server.settle()


def test_a_new_chunk_in_the_middle_is_computed_and_the_next_time_reused(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    warm = prompts.build(passages=[texts[10], texts[11]], question="x")
    server.ask(ask_of(warm, warm=True), tokens=1)
    layout = prompts.build(passages=[texts[10], texts[12], texts[11]], question="What is a comment?")
    [expected] = plain.ask(layout.token_ids)
    [found] = server.ask(ask_of(layout, ratio=1.0))
    assert_same(found, expected)
    assert [chunk["reason"] for chunk in found.report["chunks"]] == [None, "never warmed", None]
    server.settle()
    again = prompts.build(passages=[texts[12], texts[10]], question="What is a comment?")
    [found] = server.ask(ask_of(again, ratio=1.0))
    assert found.report["misses"] == {}
    assert_same(found, plain.ask(again.token_ids)[0])


def test_one_prompt_from_five_sources(plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    builder = PromptBuilder(prompts.tokenizer, system=LONG_SYSTEM)
    for i in (20, 21, 22, 23):  # the last one stays where the model runs, the last two in host memory
        server.ask(ask_of(builder.build(passages=[texts[i]], question="x"), warm=True), tokens=1)
    prefix = builder.build(question="What is an expression?")
    server.ask(prefix.token_ids, tokens=1)  # an exact prefix in vLLM's own cache
    layout = builder.build(passages=[texts[i] for i in (20, 24, 23, 22)], question="What is an expression?")
    [found] = server.ask(ask_of(layout, ratio=1.0))
    assert_same(found, plain.ask(layout.token_ids)[0])
    tiers = [chunk["tier"] for chunk in found.report["chunks"]]
    assert tiers == ["store", None, "gpu", "host"]
    assert found.report["tokens"]["cached"] >= 128
    assert sum(found.report["tokens"].values()) == len(layout)


def test_four_requests_at_once(plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layouts = [
        prompts.build(passages=[texts[(i + j) % 5] for j in range(3)], question=f"What is number {i}?")
        for i in range(4)
    ]
    expected = plain.ask(*[layout.token_ids for layout in layouts])
    found = server.ask(*[ask_of(layout, ratio=1.0) for layout in layouts])
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_the_embedded_engine_selects_and_answers_alike(
    server: Served, prompts: PromptBuilder, texts: list[str], embedded: dict
) -> None:
    layout = prompts.build(passages=[texts[i] for i in (30, 31, 32)], question="What is a keyword?")
    server.ask(ask_of(layout, warm=True), tokens=1)
    for selector, expected in embedded.items():
        [found] = server.ask(ask_of(layout, ratio=0.15, selector=selector))
        assert found.report["recomputed"] == expected["recomputed"], selector
        assert found.token_ids == expected["token_ids"], selector


def test_streaming_and_log_probabilities_of_the_prompt_and_skipped_caches(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[40:42], question="What is a token?")
    [expected] = plain.ask(layout.token_ids)
    bypasses: list[tuple[dict[str, Any], str]] = [
        ({"prompt_logprobs": 1}, "log-probabilities of the prompt"),
        ({"skip_reading_prefix_cache": True}, "skips cached prefixes"),
    ]
    for sampling, reason in bypasses:
        [found] = server.ask(ask_of(layout, ratio=0.0), **sampling)
        assert_same(found, expected)  # r = 0 would differ: the request was not blended
        assert reason in found.report.pop("error")
        assert found.report == {}


def test_two_answers_of_one_prompt_are_blended_once(server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[43:45], question="What is a statement?")
    before = server.metrics().get("blend_rag_requests blended", 0)
    ids, params = ask_of(layout)
    from vllm import SamplingParams

    sampling = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=4, extra_args={"kv_transfer_params": params})
    [output] = server.llm.generate([{"prompt_token_ids": list(ids)}], sampling, use_tqdm=False)
    assert len(output.outputs) == 2
    assert server.metrics()["blend_rag_requests blended"] == before + 1


def test_in_band_separators_give_the_same_as_segments_would(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    border = "<chunk-border>"
    text = f"Passages:{border}{border}{texts[50]}{border} and {border}{border}{texts[51]}{border}\nWhat is a line?"
    ids = prompts.tokenizer.markup(text)
    [expected] = plain.ask(ids)
    [first] = server.ask((ids, {"ratio": 1.0}))
    assert_same(first, expected)
    server.settle()
    [again] = server.ask((ids, {"ratio": 0.5}))
    assert [chunk["reason"] for chunk in again.report["chunks"]] == [None, None]
    assert again.report["tokens"]["recomputed"] > 20


def test_fixed_windows_need_no_borders(plain: Served, server: Served, texts: list[str], prompts: PromptBuilder) -> None:
    ids = prompts.tokenizer.literal(texts[52] + texts[53])
    for prompt in (ids, ids[:-3]):  # another end is another question over the same windows
        [found] = server.ask((prompt, {"window": 64, "ratio": 1.0}))
        assert_same(found, plain.ask(prompt)[0])
        server.settle()
    assert found.report["misses"] == {}


def test_the_report_adds_up(server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[54:57], question="What is a name?")
    server.ask(ask_of(layout, warm=True), tokens=1)
    [found] = server.ask(ask_of(layout, ratio=0.2))
    reused = sum(len(segment) for segment in layout.of_kind(SegmentKind.CHUNK))
    assert found.report["tokens"]["recomputed"] == round(0.2 * reused)
    assert sum(found.report["tokens"].values()) == len(layout) == found.report["prompt_tokens"]
    assert found.cached == len(layout) - 1
