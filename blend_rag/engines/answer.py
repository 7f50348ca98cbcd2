"""An answer while it is being generated: tokens in, text that may be shown out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from blend_rag.engines.base import SamplingParams


class Answer:
    """Collects one row's tokens until the end of the turn, a stop string or the length limit.

    Text is released only when no later token can change it: not in the middle of a character, and not while it may be
    the beginning of a stop string. Stop strings are not part of the text.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], sampling: SamplingParams, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids if not sampling.ignore_eos else ()
        self._stop = sampling.stop
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, token_id: int) -> str:
        """Take the next token; returns text to show now. Ignored once finished."""
        if self.finish_reason:
            return ""
        if token_id in self._eos_ids:
            self.finish_reason = "stop"
        else:
            self.token_ids.append(token_id)
            if len(self.token_ids) >= self.max_tokens:
                self.finish_reason = "length"
        return self._show()

    def end(self, finish_reason: str) -> str:
        """No token comes any more; returns text to show now."""
        if self.finish_reason:
            return ""
        self.finish_reason = finish_reason
        return self._show()

    def _show(self) -> str:
        whole = str(self._tokenizer.decode(self.token_ids, skip_special_tokens=True))
        ends = [whole.find(stop) for stop in self._stop if stop in whole]
        if ends:
            whole = whole[: min(ends)]
            self.finish_reason = "stop"
        safe = len(whole) if self.finish_reason else len(whole) - self._unsettled(whole)
        shown = whole[len(self.text) : safe]
        self.text += shown
        return shown

    def _unsettled(self, whole: str) -> int:
        """How many characters at the end may still change or belong to a stop string."""
        held = len(whole) - len(whole.rstrip("\ufffd"))
        for stop in self._stop:
            for width in range(min(len(stop) - 1, len(whole)), held, -1):
                if whole.endswith(stop[:width]):
                    held = width
                    break
        return held
