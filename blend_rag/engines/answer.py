"""An answer while it is being generated: tokens in, text that may be shown out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from blend_rag.engines.base import SamplingParams

_SETTLE = 16  # tokens after which text is taken as known
_OVERLAP = 8


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
        self._settled = 0  # leading tokens whose text is known and will not change
        self._settled_text = ""
        self._overlap_text = ""  # of the last few of them alone
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
        whole = self._decoded()
        ends = [whole.find(stop) for stop in self._stop if stop in whole]
        if ends:
            whole = whole[: min(ends)]
            self.finish_reason = "stop"
        safe = len(whole) if self.finish_reason else len(whole) - self._unsettled(whole)
        shown = whole[len(self.text) : safe]
        self.text += shown
        return shown

    def _decoded(self) -> str:
        """Text of all tokens. Only the last ones are decoded, with a few before them that make words come out whole."""
        tail = self._decode(max(0, self._settled - _OVERLAP))
        if self._settled and tail.startswith(self._overlap_text):
            whole = self._settled_text + tail[len(self._overlap_text) :]
        else:
            whole = self._decode(0)
        if len(self.token_ids) - self._settled >= _SETTLE and not whole.endswith("\ufffd"):
            self._settled, self._settled_text = len(self.token_ids), whole
            self._overlap_text = self._decode(max(0, self._settled - _OVERLAP))
        return whole

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self.token_ids[start:], skip_special_tokens=True))

    def _unsettled(self, whole: str) -> int:
        """How many characters at the end may still change or belong to a stop string."""
        held = len(whole) - len(whole.rstrip("\ufffd"))
        for stop in self._stop:
            for width in range(min(len(stop) - 1, len(whole)), held, -1):
                if whole.endswith(stop[:width]):
                    held = width
                    break
        return held
