"""Prompt builders made once per kind of prompt, for packages that lay out prompts of many kinds on one engine."""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from blend_rag.layout import DEFAULT_SEPARATOR, DEFAULT_TEMPLATE, PromptBuilder
from blend_rag.tokenization import PromptTokenizer

_KEPT = 64
_TOKENIZERS: weakref.WeakKeyDictionary[Any, PromptTokenizer] = weakref.WeakKeyDictionary()


class PromptBuilders:
    """Builders for one tokenizer, by what their prompts begin with. Safe to use from several threads.

    Args:
        tokenizer: the model's fast tokenizer.
        separator: what stands between chunks where a prompt does not say.
        chat: use the tokenizer's chat template; by default if it has one.
        template_kwargs: further arguments of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        separator: str = DEFAULT_SEPARATOR,
        chat: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = _prompt_tokenizer(tokenizer)
        self.separator = separator
        self._chat = chat
        self._template_kwargs = dict(template_kwargs or {})
        self._builders: OrderedDict[str, PromptBuilder] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def chat_template(self) -> str:
        """Text of the chat template in use; empty where there is none."""
        if self._chat is False:
            return ""
        given = self._template_kwargs.get("chat_template") or self.tokenizer.chat_template or ""
        return given if isinstance(given, str) else "\n".join(map(str, given.values()))

    def builder(
        self,
        system: str | None = None,
        template: str = DEFAULT_TEMPLATE,
        separator: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptBuilder:
        """Builder of prompts that begin alike; its prefix is what chunks are warmed behind.

        Raises:
            PromptError: the template or the separator cannot be used.
        """
        between = self.separator if separator is None else separator
        name = json.dumps([system, template, between, list(tools)], sort_keys=True, default=str)
        with self._lock:
            found = self._builders.get(name)
            if found is None:
                found = self._builders[name] = PromptBuilder(
                    self.tokenizer,
                    system=system,
                    template=template,
                    separator=between,
                    chat=self._chat,
                    template_kwargs={**self._template_kwargs, **({"tools": list(tools)} if tools else {})},
                )
            self._builders.move_to_end(name)
            if len(self._builders) > _KEPT:
                self._builders.popitem(last=False)
        return found


def _prompt_tokenizer(tokenizer: Any) -> PromptTokenizer:
    """One per tokenizer in this process: it takes a moment to make."""
    if isinstance(tokenizer, PromptTokenizer):
        return tokenizer
    if tokenizer not in _TOKENIZERS:
        _TOKENIZERS[tokenizer] = PromptTokenizer(tokenizer)
    return _TOKENIZERS[tokenizer]
