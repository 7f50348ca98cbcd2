"""Passages inside plain text, for callers that can pass nothing but strings.

Two forms. *Enclosed*: what `enclose` makes, a doubled separator, the passage, a separator; whatever stands around it is
ordinary text. *Typed*: text with single separators, in which every piece but the last is a passage and the last is the
question. A passage that holds the separator itself is escaped and stays what it is.
"""

from __future__ import annotations

import re

from blend_rag.errors import PromptError
from blend_rag.layout import Passages

IN_BAND_SEPARATOR = "<chunk-border>"
_JOINER = "\u2060"  # word joiner: what escapes a separator inside a passage


def enclose(text: str, separator: str = IN_BAND_SEPARATOR) -> str:
    """A passage with its borders; `split` gives back the exact text.

    Raises:
        PromptError: the separator cannot be told from text.
    """
    return separator * 2 + _shift_escapes(text, separator, 1) + separator


def split(text: str, separator: str = IN_BAND_SEPARATOR, glue: str = "") -> tuple[str | Passages, ...]:
    """Ordinary text and groups of passages, in order; one text where there is no separator.

    Args:
        text: a message.
        separator: what marks borders.
        glue: passages with just this between them form one group.

    Raises:
        PromptError: the separator cannot be told from text.
    """
    check_separator(separator)
    pieces = text.split(separator)
    if len(pieces) == 1:
        return (text,)
    enclosed = any(not piece for piece in pieces[1:-1])
    return _enclosed(pieces, separator, glue) if enclosed else _typed(pieces)


def _enclosed(pieces: list[str], separator: str, glue: str) -> tuple[str | Passages, ...]:
    found: list[str | Passages] = []
    text, at = pieces[0], 1
    while at < len(pieces):
        if pieces[at] or at + 1 == len(pieces):
            text += separator + pieces[at]  # a single separator of somebody else's
            at += 1
            continue
        passage = Passages.of([_shift_escapes(pieces[at + 1], separator, -1)])
        if found and isinstance(found[-1], Passages) and text == glue:
            passage = Passages((*found.pop().passages, *passage.passages))  # type: ignore[union-attr]
        elif text:
            found.append(text)
        found.append(passage)
        text = pieces[at + 2] if at + 2 < len(pieces) else ""
        at += 3
    return (*found, text) if text else tuple(found)


def _typed(pieces: list[str]) -> tuple[str | Passages, ...]:
    *passages, question = [piece for piece in pieces if piece.strip()] or [""]
    return (Passages.of(passages), question) if passages else (question,)


def _shift_escapes(text: str, separator: str, by: int) -> str:
    """Every run of joiners behind the first character of a separator, longer or shorter by `by`."""
    check_separator(separator)
    first, rest = re.escape(separator[0]), re.escape(separator[1:])
    least = "*" if by > 0 else "+"
    pattern = f"({first})({_JOINER}{least})(?={rest})"
    return re.sub(pattern, lambda match: match[1] + _JOINER * (len(match[2]) + by), text)


def check_separator(separator: str) -> None:
    """Refuse a separator that cannot be told from text.

    Raises:
        PromptError: with what is wrong with it.
    """
    if len(separator.strip()) < 3:
        msg = f"separator {separator!r} is too easily found in text: use one of at least three visible characters"
        raise PromptError(msg)
    if any(separator[:width] == separator[-width:] for width in range(1, len(separator))):
        msg = f"separator {separator!r} begins as it ends, so neighbours could overlap: change one of its ends"
        raise PromptError(msg)
