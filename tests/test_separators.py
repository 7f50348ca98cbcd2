"""Separators are found again in flat ids, whatever stands beside them, and ordinary prose holds none."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blend_rag.errors import PromptError
from blend_rag.separators import Separator
from blend_rag.tokenization import PromptTokenizer
from tests.tokenizers_for_tests import TOKENIZERS, byte_level, sentencepiece

HASHES = " # # "
PROSE = "see issue #42 and #include <stdio.h>; C# is a language, #1 too"
BORDERS = [
    ("you", "are here", "the end"),  # letters
    ("in 1889", "42 files", "10"),  # digits
    ("(it ends.", '"is it?"', "- a mark!)"),  # punctuation
    ("café", "中文", "naïve"),
    ("#42", "#include", "C#"),
]
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@cache
def tokenizer_of(name: str) -> PromptTokenizer:
    return PromptTokenizer(TOKENIZERS[name]())


@cache
def hashes(name: str) -> Separator:
    return Separator.derive(tokenizer_of(name), HASHES)


def usual_ids(name: str, text: str) -> list[int]:
    """Ids of an ordinary call: BOS and EOS where the tokenizer adds them."""
    return list(TOKENIZERS[name]()(text).input_ids)


@each_tokenizer
@pytest.mark.parametrize("documents", BORDERS)
def test_three_spliced_documents_split_into_their_own_ids(name: str, documents: tuple[str, str, str]) -> None:
    separator = hashes(name)
    runs = [tokenizer_of(name).literal(document) for document in documents]
    flat = [*runs[0], *separator.ids, *runs[1], *separator.ids, *runs[2]]
    assert separator.split(flat) == runs


@each_tokenizer
@pytest.mark.parametrize("documents", BORDERS)
def test_three_documents_tokenised_in_one_go_split_in_three(name: str, documents: tuple[str, str, str]) -> None:
    tokenizer = tokenizer_of(name)
    runs = hashes(name).split(usual_ids(name, HASHES.join(documents)))
    assert len(runs) == 3
    assert tokenizer.decode(runs[1]).split() == tokenizer.decode(tokenizer.literal(documents[1])).split()


@each_tokenizer
@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(
        st.text("aZ9.,()\"'!?é-_/", min_size=1, max_size=8).filter(lambda text: "#" not in text), min_size=2, max_size=5
    )
)
def test_every_document_is_found_beside_any_neighbour(name: str, documents: list[str]) -> None:
    assert len(hashes(name).split(usual_ids(name, HASHES.join(documents)))) == len(documents)


@each_tokenizer
@pytest.mark.parametrize("text", [PROSE, "issue #42", "#include", "a # b"])
def test_prose_with_number_signs_does_not_split(name: str, text: str) -> None:
    assert hashes(name).find(usual_ids(name, text)) == []


@each_tokenizer
def test_ids_of_a_separator_do_not_depend_on_when_it_is_derived(name: str) -> None:
    again = Separator.derive(PromptTokenizer(TOKENIZERS[name]()), HASHES)
    assert again == hashes(name)
    assert again.fragile is None
    assert again.ids in again.patterns


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("byte_level", "<|endoftext|>"),
        ("byte_level", "<think>"),
        ("byte_level_bos", "<|reserved_0|>"),
        ("sentencepiece", "</s>"),
        ("unigram", "<pad>"),
        ("wordpiece", "[SEP]"),
        ("wordpiece_whitespace", "[PAD]"),
    ],
)
def test_a_reserved_token_is_one_id_and_splits_text_without_spaces(name: str, token: str) -> None:
    tokenizer = tokenizer_of(name)
    separator = Separator.derive(tokenizer, token)
    assert separator.ids == (TOKENIZERS[name]().convert_tokens_to_ids(token),)
    assert separator.patterns == (separator.ids,)
    in_text = tokenizer.markup(token.join(["you", "are.", "42"]))
    assert len(separator.split(in_text)) == 3
    assert separator.find(tokenizer.literal(f"a document that names {token} itself")) == []


@pytest.mark.parametrize("name", ["byte_level", "byte_level_bos", "sentencepiece", "sentencepiece_legacy"])
def test_blank_lines_are_found_in_text_but_flagged(name: str) -> None:
    separator = Separator.derive(tokenizer_of(name), "\n\n")
    assert "white space, which ordinary text holds too" in str(separator.fragile)
    assert len(separator.split(tokenizer_of(name).markup("you\n\nare\n\nhere"))) == 3


def test_a_separator_that_merges_with_its_neighbours_says_so() -> None:
    glued = Separator.derive(tokenizer_of("wordpiece_whitespace"), "###")
    assert "merges with its neighbours" in str(glued.fragile)
    assert "white space around it, or a reserved token" in str(glued.fragile)


def test_a_token_that_holds_a_visible_neighbour_is_never_taken_for_the_separator() -> None:
    double = byte_level().convert_tokens_to_ids("==")
    separator = Separator.derive(tokenizer_of("byte_level"), "=")
    assert double in tokenizer_of("byte_level").literal("a == b")
    assert all(double not in pattern for pattern in separator.patterns)
    assert separator.find(tokenizer_of("byte_level").literal("a == b")) == []


def test_sentencepiece_separators_leave_the_space_to_the_next_chunk() -> None:
    separator = Separator.derive(tokenizer_of("sentencepiece"), HASHES)
    chunks = [tokenizer_of("sentencepiece").literal(text) for text in ("you", "are")]
    whole = sentencepiece()(HASHES.join(["you", "are"]), add_special_tokens=False).input_ids
    assert [*chunks[0], *separator.ids, *chunks[1]] == whole


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(PromptError, match="cannot be empty: pass separator=None"):
        Separator.derive(tokenizer_of("byte_level"), "")


@pytest.mark.parametrize(
    ("name", "text"), [("wordpiece", "\n\n"), ("wordpiece", " \u2603 "), ("unigram", "\n\n"), ("unigram", "\u2603")]
)
def test_a_separator_the_vocabulary_cannot_spell_is_refused(name: str, text: str) -> None:
    with pytest.raises(PromptError, match="no tokens that spell"):
        Separator.derive(tokenizer_of(name), text)


def test_adjacent_separators_and_separators_at_the_ends_leave_no_empty_run() -> None:
    separator = hashes("byte_level")
    width = len(separator.ids)
    flat = [*separator.ids, *separator.ids, 7, *separator.ids]
    assert separator.find(flat) == [(0, width), (width, 2 * width), (2 * width + 1, 3 * width + 1)]
    assert separator.split(flat) == [(7,)]
    assert separator.split(separator.ids) == []
    assert separator.split([]) == []


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 450), st.sampled_from(byte_level()(HASHES).input_ids + byte_level()(" #").input_ids))
    )
)
def test_found_spans_are_patterns_in_order_without_overlap(ids: list[int]) -> None:
    separator = hashes("byte_level")
    spans = separator.find(ids)
    assert all(tuple(ids[start:end]) in separator.patterns for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    between = [run for run in separator.split(ids) for pattern in separator.patterns if run == pattern]
    assert between == []


def test_a_name_that_is_no_reserved_token_is_an_ordinary_string() -> None:
    tokenizer = tokenizer_of("byte_level")
    separator = Separator.derive(tokenizer, "<|split|>")
    assert len(separator.ids) > 1
    assert tokenizer.decode(separator.ids) == "<|split|>"


def test_a_reserved_token_added_later_needs_a_new_derivation() -> None:
    shared = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=shared)
    wrapped.add_special_tokens({"additional_special_tokens": ["<|split|>"]})
    separator = Separator.derive(PromptTokenizer(wrapped), "<|split|>")
    assert separator.ids == (wrapped.convert_tokens_to_ids("<|split|>"),)
