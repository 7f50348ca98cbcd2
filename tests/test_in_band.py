"""Passages inside plain text come back exactly as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend_rag.errors import PromptError
from blend_rag.in_band import IN_BAND_SEPARATOR as SEP
from blend_rag.in_band import enclose, split
from blend_rag.layout import Passages

TEXTS = st.lists(st.sampled_from([*"ab \n<>-\u2060", SEP, SEP[0], SEP[1:]]), min_size=1, max_size=12).map("".join)


def passages(parts: tuple[str | Passages, ...]) -> list[str]:
    return [passage.text for part in parts if isinstance(part, Passages) for passage in part.passages]


def test_enclosed_passages_leave_the_text_around_them_alone() -> None:
    text = f"Answer from:\n\n{enclose('one')}\n\n{enclose('two')}\n\nQuestion: which?"
    assert split(text) == (
        "Answer from:\n\n",
        Passages.of(["one"]),
        "\n\n",
        Passages.of(["two"]),
        "\n\nQuestion: which?",
    )
    assert split(text, glue="\n\n") == ("Answer from:\n\n", Passages.of(["one", "two"]), "\n\nQuestion: which?")


def test_the_question_may_stand_before_the_passages() -> None:
    text = f"Which? {enclose('one')}{enclose('two')}"
    assert split(text) == ("Which? ", Passages.of(["one", "two"]))


def test_typed_separators_make_everything_but_the_last_piece_a_passage() -> None:
    assert split(f"one{SEP}two{SEP}Which?") == (Passages.of(["one", "two"]), "Which?")
    assert split(f"{SEP}one{SEP} {SEP}Which?") == (Passages.of(["one"]), "Which?")


def test_text_without_separators_stays_one_text() -> None:
    for text in ("", "Which?", "issue #42, #include <stdio.h>, # # #", "<chunk border>", "< chunk-border>"):
        assert split(text) == (text,)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(["", "\n\n", " and "]))
def test_any_passage_comes_back_exactly(texts: list[str], between: str) -> None:
    text = "Before: " + between.join(map(enclose, texts)) + " after?"
    assert passages(split(text)) == texts
    assert split(text)[0] == "Before: "
    assert split(text)[-1] == " after?"


def test_a_separator_that_text_holds_too_is_refused() -> None:
    for separator in ("", "\n\n", " # ", "##"):
        with pytest.raises(PromptError, match="three visible characters"):
            split("text", separator)
        with pytest.raises(PromptError, match="three visible characters"):
            enclose("text", separator)
    with pytest.raises(PromptError, match="begins as it ends"):
        split("text", "\n<chunk>\n")
