"""Tool calls are read out of answers in the form the chat template uses."""

from __future__ import annotations

import pytest

from langchain_blend_rag.tools import parse_bare, parse_listed, parse_tagged, parser_for


@pytest.mark.parametrize(
    ("parse", "written", "text"),
    [
        (parse_tagged, 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "Let me see."),
        (parse_tagged, '<tool_call>{"name": "add", "arguments": {"a": 1}}', ""),
        (parse_listed, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', ""),
        (parse_bare, '{"name": "add", "parameters": {"a": 1}}', ""),
        (parse_bare, '<|python_tag|>{"name": "add", "arguments": "{\\"a\\": 1}"}', ""),
    ],
)
def test_calls_are_found(parse, written: str, text: str) -> None:
    found, calls, invalid = parse(written)
    assert (found, invalid) == (text, [])
    assert [(call["name"], call["args"]) for call in calls] == [("add", {"a": 1})]
    assert calls[0]["id"].startswith("call_")


def test_two_calls_and_broken_ones() -> None:
    text, calls, invalid = parse_tagged(
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": }</tool_call>'
    )
    assert (text, [call["name"] for call in calls], len(invalid)) == ("", ["a"], 1)
    assert parse_listed("[TOOL_CALLS] nonsense")[2][0]["args"].strip() == "nonsense"
    assert parse_bare('{"name": 3}')[2] != []


@pytest.mark.parametrize("parse", [parse_tagged, parse_listed, parse_bare])
def test_plain_answers_stay(parse) -> None:
    for text in ("Fredville.", "", "{not json", "A <b>tag</b> and [a list]"):
        assert parse(text) == (text, [], [])


def test_the_form_follows_the_chat_template() -> None:
    assert parser_for("{{ messages }}") is None
    assert parser_for("{% if tools %}<tool_call>{% endif %}") is parse_tagged
    assert parser_for("{% if tools %}[TOOL_CALLS]{% endif %}") is parse_listed
    assert parser_for("{% if tools %}{{ tools }}{% endif %}") is parse_bare
