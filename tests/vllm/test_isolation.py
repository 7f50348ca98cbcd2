"""Approximate pages never pass for exact ones, and one question's never for another's."""

from __future__ import annotations

import dataclasses

import pytest

from blend_rag import PromptBuilder
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.layout import PromptLayout, Segment
from blend_rag.vllm.request import BlendRequest
from tests.vllm.models import bare_layout
from tests.vllm.serving import Served, ask_of, assert_same, far_apart


def test_a_plain_request_after_a_blended_one_is_exact(
    plain: Served, faulty: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[0:4], question="What is a suite?")
    [expected] = plain.ask(layout.token_ids)
    faulty.ask(ask_of(layout, warm=True), tokens=1)
    [blended] = faulty.ask(ask_of(layout, ratio=0.0))
    assert far_apart(blended, expected)  # else this test could not fail
    [after] = faulty.ask(layout.token_ids)
    assert_same(after, expected)
    assert after.cached < len(layout) // 2


def test_without_salted_hashes_the_same_request_would_be_wrong(
    plain: Served, faulty: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[4:8], question="What is a suite?")
    [expected] = plain.ask(layout.token_ids)
    faulty.ask(ask_of(layout, warm=True), tokens=1)
    faulty.ask(ask_of(layout, ratio=0.0, test="unsalted"))
    [after] = faulty.ask(layout.token_ids)
    assert after.cached > len(layout) // 2
    assert far_apart(after, expected)


def test_another_question_over_the_same_chunks_gets_what_a_cold_server_gives(
    faulty: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    questions = ("What is a suite?", "How are names bound to objects, and where?")
    first, second = (prompts.build(passages=texts[8:12], question=question) for question in questions)
    faulty.ask(ask_of(first, warm=True), tokens=1)
    [cold] = faulty.ask(ask_of(second, ratio=0.1))
    faulty.llm.reset_prefix_cache()
    faulty.ask(ask_of(first, ratio=0.1))
    [found] = faulty.ask(ask_of(second, ratio=0.1))
    assert found.report["recomputed"] == cold.report["recomputed"]
    assert_same(found, cold, 1e-4)


def test_an_identical_blend_is_cached(faulty: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[12:16], question="What is a suite?")
    [first] = faulty.ask(ask_of(layout, ratio=0.1))
    before = faulty.metrics()["blend_rag_requests blended"]
    [again] = faulty.ask(ask_of(layout, ratio=0.1))
    assert faulty.metrics()["blend_rag_requests blended"] == before
    assert again.report["tokens"]["cached"] > len(layout) // 2
    assert_same(again, first, 1e-4)


def test_two_requests_that_share_a_prefix_in_one_step(
    plain: Served, server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    builder = PromptBuilder(prompts.tokenizer, system="Read carefully, then answer from these passages. " * 20)
    layout = builder.build(passages=texts[16:18], question="What is a suite?")
    bare = builder.build(question="What is a suite?")
    expected = plain.ask(bare.token_ids, layout.token_ids)
    found = server.ask(bare.token_ids, ask_of(layout, ratio=1.0))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


BASE = bare_layout([("prefix", 8), ("chunk", 20), ("chunk", 20), ("question", 6)])


def _shifted(layout: PromptLayout) -> PromptLayout:
    prefix, first, second, question = layout.segments
    return dataclasses.replace(
        layout,
        segments=(
            prefix,
            Segment(first.kind, first.start, first.end + 1, ""),
            Segment(second.kind, second.start + 1, second.end, ""),
            question,
        ),
    )


@pytest.mark.parametrize(
    "other",
    [
        BlendRequest(BASE, RecomputePolicy(ratio=0.2), ""),
        BlendRequest(BASE, RecomputePolicy(selector="first-k"), ""),
        BlendRequest(BASE, RecomputePolicy(selector="query-guided", context="alone"), ""),
        BlendRequest(BASE, RecomputePolicy(), "tenant"),
        BlendRequest(BASE, RecomputePolicy(), "", warm=True),
        BlendRequest(dataclasses.replace(BASE, context_ids=(1, 2)), RecomputePolicy(), ""),
        BlendRequest(_shifted(BASE), RecomputePolicy(), ""),
        BlendRequest(dataclasses.replace(BASE, token_ids=(*BASE.token_ids[:-1], 7)), RecomputePolicy(), ""),
    ],
)
def test_everything_that_shapes_blended_pages_is_in_their_salt(other: BlendRequest) -> None:
    assert other.salt() != BlendRequest(BASE, RecomputePolicy(), "").salt()


def test_a_rule_blind_to_the_question_shares_pages_between_questions() -> None:
    policy = RecomputePolicy(selector="first-k")
    other = dataclasses.replace(BASE, token_ids=(*BASE.token_ids[:-1], 7))
    assert BlendRequest(BASE, policy, "").salt() == BlendRequest(other, policy, "").salt()
