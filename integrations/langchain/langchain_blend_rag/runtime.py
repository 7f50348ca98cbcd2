"""Messages to layouts, on the prompt builders of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from blend_rag import Passages, PromptLayout
from blend_rag.builders import PromptBuilders
from langchain_blend_rag.segments import leading_system, mark_of, parts_of, text_of, to_core


class BlendRuntime(PromptBuilders):
    """Prompt builders that know LangChain's messages.

    Args:
        tokenizer: the model's fast tokenizer.
        in_band: separator that marks chunks inside plain text.
        options: further arguments of `PromptBuilders`.
    """

    def __init__(self, tokenizer: Any, *, in_band: str, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._in_band = in_band

    def layout(self, messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]] = ()) -> PromptLayout:
        """Messages as a prompt, their passages as chunks.

        Raises:
            PromptError: the messages cannot be laid out.
            ValueError: a message's content is no text.
        """
        system, rest = leading_system(messages)
        found = mark_of(rest[-1]) if rest else None
        if found is None or "template" not in found:  # not made by `BlendPrompt`
            builder = self.builder(system, tools=tools)
            return builder.build_messages([to_core(message, builder.glue, self._in_band) for message in rest])
        builder = self.builder(system, found["template"], found["separator"], tools)
        groups = [part for part in parts_of(rest[-1], builder.glue) if isinstance(part, Passages)]
        return builder.build(
            question=text_of(rest[-1])[slice(*found["question"])],
            passages=[passage for group in groups for passage in group.passages],
            history=[to_core(message, builder.glue, self._in_band) for message in rest[:-1]],
        )
