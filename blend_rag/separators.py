"""Separators: marks between chunks, derived once per tokenizer and found again in a flat list of ids.

Layouts splice separators as ids, so they never touch a neighbour. Finding them again matters for callers that can
only send text: there a byte-pair merge may change the ids beside a separator, and the search must not care.
A separator only moves cache borders; one that happens to stand inside a document changes no id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import punctuation

from blend_rag.errors import PromptError
from blend_rag.tokenization import PromptTokenizer

_NEIGHBOURS = ("", "a", "Z", "9", ".", ")", "#", "-", "\n", "\n\n", " ", "é", "the end", "\u4e2d")
_CONTEXTS = (
    *product(_NEIGHBOURS, repeat=2),
    *((mark, "a") for mark in punctuation),
    *(("a", mark) for mark in punctuation),
)


@dataclass(frozen=True, slots=True)
class Separator:
    """A mark between chunks.

    Attributes:
        text: what is written between chunks.
        ids: its canonical ids, as layouts splice them.
        patterns: every id run it shows up as beside different neighbours, longest first.
        fragile: why it cannot be relied on inside plain text, or None where it can.
    """

    text: str
    ids: tuple[int, ...]
    patterns: tuple[tuple[int, ...], ...]
    fragile: str | None = None

    @classmethod
    def derive(cls, tokenizer: PromptTokenizer, text: str) -> Separator:
        """Derive a separator from a string, or from the name of one reserved token.

        Raises:
            PromptError: the text is empty, has no tokens, or cannot be spelled by this tokenizer.
        """
        if not text:
            msg = "a separator cannot be empty: pass separator=None for none"
            raise PromptError(msg)
        reserved = tokenizer.token_id(text)
        if reserved is not None:
            return cls(text, (reserved,), ((reserved,),))
        ids = _spliced_ids(tokenizer, text)
        if not ids or tokenizer.unk_id in ids:
            msg = f"this tokenizer has no tokens that spell separator {text!r}: choose another, or None"
            raise PromptError(msg)
        patterns, fragile = _patterns_in_text(tokenizer, text)
        ordered = sorted({ids, *patterns}, key=lambda pattern: (-len(pattern), pattern))
        return cls(text, ids, tuple(ordered), fragile)

    def find(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Spans [start, end) of this separator in a flat list of ids, left to right, never overlapping."""
        firsts = {pattern[0] for pattern in self.patterns}
        spans: list[tuple[int, int]] = []
        at = 0
        while at < len(token_ids):
            width = self._width_at(token_ids, at) if token_ids[at] in firsts else 0
            if width:
                spans.append((at, at + width))
            at += width or 1
        return spans

    def split(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The non-empty runs of ids between separators."""
        borders = [0, *(edge for span in self.find(token_ids) for edge in span), len(token_ids)]
        runs = (tuple(token_ids[start:end]) for start, end in zip(borders[::2], borders[1::2], strict=True))
        return [run for run in runs if run]

    def _width_at(self, token_ids: Sequence[int], at: int) -> int:
        for pattern in self.patterns:
            if tuple(token_ids[at : at + len(pattern)]) == pattern:
                return len(pattern)
        return 0


def _spliced_ids(tokenizer: PromptTokenizer, text: str) -> tuple[int, ...]:
    """Ids between two chunks: where a chunk brings its own leading space, the separator's last one would double it."""
    if tokenizer.adds_prefix_space:
        text = text.removesuffix(" ") or text
    return tokenizer.literal(text, inside=True)


def _patterns_in_text(tokenizer: PromptTokenizer, text: str) -> tuple[set[tuple[int, ...]], str | None]:
    """Id runs that `text` becomes between different neighbours, and why they may be unreliable."""
    runs = [_run_between(tokenizer, left, text, right) for left, right in _CONTEXTS]
    patterns = {run for run in runs if run}
    swallowed = len(runs) - sum(bool(run) for run in runs)
    if text.isspace():
        return patterns, f"separator {text!r} is white space, which ordinary text holds too: use a visible one in text"
    if swallowed:
        return patterns, (
            f"separator {text!r} merges with its neighbours in {swallowed} of {len(runs)} cases: "
            "in plain text use one with white space around it, or a reserved token"
        )
    return patterns, None


def _run_between(tokenizer: PromptTokenizer, left: str, text: str, right: str) -> tuple[int, ...]:
    """Ids that cover the visible part of `text`; empty where they are lost or take visible neighbours with them.

    White space around the visible part is left out, because it tends to merge with the neighbours.
    """
    visible = text.strip() or text
    start = len(left) + text.index(visible)
    stop = start + len(visible)
    whole = left + text + right
    encoding = tokenizer.markup_encoding(whole)
    run = [
        (token_id, begin, end)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
        if begin < stop and end > start
    ]
    if not run:
        return ()
    taken_along = whole[run[0][1] : start] + whole[stop : run[-1][2]]
    ids = tuple(token_id for token_id, _, _ in run)
    return () if taken_along.strip() or tokenizer.unk_id in ids else ids
