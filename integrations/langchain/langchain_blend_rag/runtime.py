"""What all parts of the package do with an engine: layouts of messages, and builders that are made once."""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from blend_rag import Engine, Passages, PromptBuilder, PromptLayout
from blend_rag.layout import DEFAULT_SEPARATOR, DEFAULT_TEMPLATE
from blend_rag.tokenization import PromptTokenizer
from langchain_blend_rag.segments import leading_system, mark_of, parts_of, text_of, to_core

_BUILDERS = 64
_TOKENIZERS: weakref.WeakKeyDictionary[Any, PromptTokenizer] = weakref.WeakKeyDictionary()


class BlendRuntime:
    """An engine and the prompt builders of the prompts it has seen.

    Args:
        engine: any engine of the core.
        separator: what stands between chunks where a message does not say.
        in_band: separator that marks chunks inside plain text.
        chat: use the tokenizer's chat template; by default if it has one.
        template_kwargs: further arguments of the chat template.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        separator: str = DEFAULT_SEPARATOR,
        in_band: str,
        chat: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.separator = separator
        self._in_band = in_band
        self._chat = chat
        self._template_kwargs = template_kwargs or {}
        self._tokenizer = _prompt_tokenizer(engine.tokenizer)
        self._builders: OrderedDict[str, PromptBuilder] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def chat_template(self) -> str:
        """Text of the chat template in use; empty where there is none."""
        given = self._template_kwargs.get("chat_template") or self._tokenizer.chat_template or ""
        return given if isinstance(given, str) else "\n".join(map(str, given.values()))

    def count(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return list(self._tokenizer.literal(text))

    def builder(
        self,
        system: str | None = None,
        template: str = DEFAULT_TEMPLATE,
        separator: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
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
                arguments = {**self._template_kwargs, **({"tools": list(tools)} if tools else {})}
                found = PromptBuilder(
                    self._tokenizer,
                    system=system,
                    template=template,
                    separator=between,
                    chat=self._chat,
                    template_kwargs=arguments,
                )
                self._builders[name] = found
            self._builders.move_to_end(name)
            if len(self._builders) > _BUILDERS:
                self._builders.popitem(last=False)
        return found

    def layout(self, messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]] = ()) -> PromptLayout:
        """Messages as a prompt, their passages as chunks.

        Raises:
            PromptError: the messages cannot be laid out.
            ValueError: a message's content is no text.
        """
        system, rest = leading_system(messages)
        found = mark_of(rest[-1]) if rest else None
        if found and "template" in found:
            builder = self.builder(system, found["template"], found["separator"], tools)
            question = text_of(rest[-1])[slice(*found["question"])]
            groups = [part for part in parts_of(rest[-1], builder_glue(builder)) if isinstance(part, Passages)]
            return builder.build(
                question=question,
                passages=[passage for group in groups for passage in group.passages],
                history=[to_core(message, builder_glue(builder), self._in_band) for message in rest[:-1]],
            )
        builder = self.builder(system, tools=tools)
        return builder.build_messages([to_core(message, builder_glue(builder), self._in_band) for message in rest])


def _prompt_tokenizer(tokenizer: Any) -> PromptTokenizer:
    """One for all models over the same engine: it takes a moment to make."""
    if tokenizer not in _TOKENIZERS:
        _TOKENIZERS[tokenizer] = PromptTokenizer(tokenizer)
    return _TOKENIZERS[tokenizer]


def builder_glue(builder: PromptBuilder) -> str:
    """What a builder puts between chunks of a group."""
    return builder.separator.text if builder.separator else ""
