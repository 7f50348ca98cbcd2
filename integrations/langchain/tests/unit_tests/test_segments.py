"""Passages keep their places on messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from blend_rag import Passage, Passages
from blend_rag.in_band import enclose
from langchain_blend_rag.segments import MARK, leading_system, mark, mark_of, parts_of, to_core

TEXT = st.text(min_size=1, max_size=8)
PARTS = st.lists(
    st.one_of(TEXT, st.lists(TEXT, min_size=1, max_size=3).map(lambda texts: Passages.of(texts))),
    min_size=1,
    max_size=5,
)


def flat(parts: object) -> list[object]:
    """Adjoining texts joined, which marks do not tell apart."""
    found: list[object] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@given(PARTS, st.sampled_from(["", "\n\n", "#"]))
def test_marks_give_back_text_and_passages(parts: list[str | Passages], glue: str) -> None:
    text, found = mark(parts, glue)
    message = HumanMessage(text, additional_kwargs={MARK: found})
    assert flat(parts_of(message, glue)) == flat(parts)
    assert flat(parts_of(loads(dumps(message), allowed_objects=[HumanMessage]), glue)) == flat(parts)


def test_sources_and_documents_travel() -> None:
    passage = Passage("text", "a.md", "id-1")
    text, found = mark(["Use: ", Passages((passage,))], "\n\n")
    assert parts_of(HumanMessage(text, additional_kwargs={MARK: found}), "\n\n")[1] == Passages((passage,))


def test_a_changed_text_loses_its_mark() -> None:
    text, found = mark(["Use: ", Passages.of(["one", "two"]), " Which?"], "\n\n")
    changed = HumanMessage(text + "!", additional_kwargs={MARK: found})
    assert mark_of(changed) is None
    assert parts_of(changed, "\n\n") == (text + "!",)


def test_plain_text_is_split_at_separators_but_an_answer_is_not() -> None:
    text = f"Use {enclose('one')} Which?"
    assert parts_of(HumanMessage(text), "\n\n") == ("Use ", Passages.of(["one"]), " Which?")
    assert parts_of(ToolMessage(text, tool_call_id="1"), "\n\n")[1] == Passages.of(["one"])
    assert parts_of(AIMessage(text), "\n\n") == (text,)


def test_messages_become_what_chat_templates_know() -> None:
    call = {"name": "search", "args": {"query": "x"}, "id": "1", "type": "tool_call"}
    assistant = to_core(AIMessage("", tool_calls=[call]), "")
    assert assistant.role == "assistant"
    assert assistant.extra["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "x"}}
    assert to_core(ToolMessage("found", tool_call_id="1"), "").role == "tool"
    assert to_core(HumanMessage([{"type": "text", "text": "a"}, "b"]), "").content == ("ab",)
    with pytest.raises(ValueError, match="'image_url'"):
        to_core(HumanMessage([{"type": "image_url", "image_url": "x"}]), "")


def test_only_plain_leading_system_text_is_the_system_text() -> None:
    human = HumanMessage("Which?")
    assert leading_system([SystemMessage("Be brief."), human]) == ("Be brief.", [human])
    with_passage = SystemMessage(f"Use {enclose('one')}")
    assert leading_system([with_passage, human]) == (None, [with_passage, human])
    assert leading_system([human]) == (None, [human])
