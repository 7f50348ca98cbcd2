"""Commands: what a client may ask of the connector besides answers, and what it is told when it asks wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from blend_rag import PromptBuilder, RecomputePolicy
from blend_rag.engines.wire import (
    Command,
    command_parameters,
    lookup_parameters,
    policy_parameters,
    read_report,
    request_parameters,
)
from blend_rag.vllm.request import RequestParser
from blend_rag.vllm.settings import BlendSettings
from tests.vllm.serving import Served, assert_same

POLICY = RecomputePolicy()


def command(server: Served, params: dict[str, Any], prompt: tuple[int, ...] = (5, 6)) -> dict[str, Any]:
    """What the connector answers."""
    [answer] = server.ask((prompt, params), tokens=1)
    return answer.report


def test_about_tells_versions_and_policy(server: Served) -> None:
    import vllm

    told = command(server, command_parameters(Command.ABOUT))
    assert told["vllm"] == vllm.__version__
    assert {**told["policy"], "schedule": tuple(told["policy"]["schedule"])} == policy_parameters(POLICY)
    assert told["lasting_store"] is True


def test_lookup_finds_what_was_warmed_and_forget_deletes_it(
    server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    from blend_rag import Passage

    passages = [Passage(texts[n], document=f"command {n}") for n in (55, 56, 57)]
    layout = prompts.build(passages=passages, question="Which?")
    asked = lookup_parameters(layout, POLICY)
    before = command(server, asked)
    assert [chunk["tier"] for chunk in before["chunks"]] == [None] * 3
    assert {chunk["reason"] for chunk in before["chunks"]} == {"never warmed"}
    two = prompts.build(passages=passages[:2], question="Which?")
    server.ask((two.token_ids, request_parameters(two, warm=True)), tokens=1)
    after = command(server, asked)
    assert [chunk["tier"] is not None for chunk in after["chunks"]] == [True, True, False]
    assert [chunk["context"] for chunk in after["chunks"]] == ["prefix", "prefix", None]
    assert command(server, command_parameters(Command.FORGET, document="command 55")) == {"forgotten": 1}
    gone = command(server, asked)
    assert [chunk["tier"] is not None for chunk in gone["chunks"]] == [False, True, False]
    assert command(server, command_parameters(Command.FORGET, document="command 55")) == {"forgotten": 0}


def test_a_lookup_links_further_documents_to_what_is_there(
    server: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    from blend_rag import Passage

    first = prompts.build(passages=[Passage(texts[58], document="first")], question="Which?")
    second = prompts.build(passages=[Passage(texts[58], document="second")], question="Which?")
    server.ask((first.token_ids, request_parameters(first, warm=True)), tokens=1)
    command(server, lookup_parameters(second, POLICY, link=True))
    for _ in range(50):  # noted in a thread
        if command(server, command_parameters(Command.FORGET, document="first"))["forgotten"] == 0:
            break
    assert command(server, lookup_parameters(second, POLICY))["chunks"][0]["tier"] is not None
    assert command(server, command_parameters(Command.FORGET, document="second"))["forgotten"] == 1


def test_a_report_can_be_asked_for_by_name(server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[0:2], question="Which?")
    [answer] = server.ask((layout.token_ids, request_parameters(layout, request_id="mine")), tokens=2)
    told = command(server, command_parameters(Command.REPORT, id="mine"))["report"]
    assert told == answer.report
    report = read_report(told, layout, POLICY, 0.1, [""] * len(layout))
    assert report.reused_tokens + report.recomputed_tokens + report.computed_tokens == len(layout)
    assert [segment.tokens for segment in report.segments] == [len(segment) for segment in layout.segments]
    assert command(server, command_parameters(Command.REPORT, id="somebody's"))["report"] is None
    again = server.ask((layout.token_ids, request_parameters(layout, request_id="again")), tokens=2)[0]
    told = command(server, command_parameters(Command.REPORT, id="again"))["report"]
    assert told == again.report
    counts = [sum(column) for column in zip(*told["segments"], strict=True)]
    assert sum(counts) == len(layout)


def test_commands_do_not_disturb_answers(
    server: Served, plain: Served, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[2:5], question="Which?")
    asked = (layout.token_ids, {**request_parameters(layout), "ratio": 1.0})
    many = [((7, 8), lookup_parameters(layout, POLICY)) for _ in range(6)]
    answers = server.ask(many[0], asked, *many[1:], tokens=4)
    assert_same(answers[1], plain.ask(layout.token_ids, tokens=4)[0])
    assert_same(server.ask(((7, 8), None), tokens=4)[0], plain.ask([7, 8], tokens=4)[0])
    assert_same(answers[0], plain.ask([7, 8], tokens=4)[0])  # its own prompt is answered rightly too


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": "dance"}, "no such command"),
        ({"command": "lookup"}, "prompt"),
        ({"command": "lookup", "prompt": [1, 10**9], "segments": [["chunk", 2]]}, "token id"),
        ({"command": "lookup", "prompt": [1, 2], "segments": [["chunk", 5]]}, "add up"),
        ({"command": "forget"}, "document"),
        ({"command": "forget", "document": "x" * 5000}, "document"),
        ({"command": "report", "id": 7}, "id"),
        ({"command": "about", "namespace": "other"}, "namespace"),
        ({"command": "about", "documnet": "x"}, "documnet"),
    ],
)
def test_senseless_commands_are_refused_in_words(server: Served, given: dict[str, Any], words: str) -> None:
    assert words in command(server, given)["error"]


def test_refused_and_bypassed_requests_are_told_why(server: Served, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[0:2], question="Which?")
    ids, params = layout.token_ids, request_parameters(layout)
    [refused] = server.ask((ids, {**params, "ratio": 7}), tokens=1)
    assert "ratio" in refused.report["error"]
    [bypassed] = server.ask((ids, {**params, "id": "bypassed"}), tokens=1, prompt_logprobs=0)
    assert "log-probabilities" in bypassed.report["error"]
    assert "log-probabilities" in command(server, command_parameters(Command.REPORT, id="bypassed"))["report"]["error"]


def test_a_command_has_two_tokens() -> None:
    parser = RequestParser(BlendSettings(), None, 2048, 1000)
    with pytest.raises(ValueError, match="2 tokens"):
        parser.parse((1, 2, 3), {"command": "about"})
    request = parser.parse((1, 2), {"command": "about"})
    assert request is not None
    assert request.order is not None
