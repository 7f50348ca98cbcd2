"""`BlendSynthesizer`: answers from whole nodes, laid out so that their KV is reused."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from blend_rag import Message, Passage, PromptBuilder, PromptLayout
from blend_rag.layout import DEFAULT_SEPARATOR
from llama_index.llms.blend_rag.base import BlendLLM

logger = logging.getLogger(__name__)

DEFAULT_QA_TEMPLATE = PromptTemplate("{context_str}\n\n{query_str}")


class BlendSynthesizer(BaseSynthesizer):
    """Answers a question from nodes, none of which is ever cut.

    A node is prompted as `node.get_content(MetadataMode.LLM)`, exactly as it was warmed. Over budget, whole nodes are
    left out, lowest rank (last) first. `response.metadata["blend_rag"]` tells which, and what was reused. Any other LLM
    gets the same text with the separator between nodes.

    Args:
        llm: by default LlamaIndex's `Settings.llm`.
        system_prompt: system text; with the template's text before its first field, what nodes are warmed behind.
        text_qa_template: holds `{context_str}` and `{query_str}` once each; a chat template may bring system text.
        reserve_tokens: room kept for the answer; by default the model's `max_tokens`.
        history: messages between the system text and the question.
        kwargs: further arguments of LlamaIndex's `BaseSynthesizer`, such as `streaming`.

    Raises:
        PromptError: the template cannot be used.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        system_prompt: str | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        reserve_tokens: int | None = None,
        history: Sequence[Message] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(llm=llm, **kwargs)
        self._system_prompt = system_prompt
        self._text_qa_template = text_qa_template or DEFAULT_QA_TEMPLATE
        self._reserve_tokens = reserve_tokens
        self._history = tuple(history)
        if isinstance(self._llm, BlendLLM):
            _ = self.builder  # a template that cannot be used is said now

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if "text_qa_template" in prompts:
            self._text_qa_template = prompts["text_qa_template"]

    @property
    def llm(self) -> LLM:
        """The model that answers."""
        return self._llm

    @property
    def builder(self) -> PromptBuilder:
        """Lays out this synthesizer's prompts, on a `BlendLLM`.

        Raises:
            PromptError: the template cannot be used.
        """
        assert isinstance(self._llm, BlendLLM), "only a BlendLLM lays out prompts"
        system, template = self._system_and_template()
        return self._llm.builders.builder(system, template)

    def _system_and_template(self) -> tuple[str | None, str]:
        template, system = self._text_qa_template, self._system_prompt
        if isinstance(template, ChatPromptTemplate):
            texts = [(message.role, message.content or "") for message in template.message_templates]
            systems = [text for role, text in texts if role is MessageRole.SYSTEM]
            users = [text for role, text in texts if role is not MessageRole.SYSTEM]
            written = users[-1] if users else ""
            system = "\n\n".join([*([system] if system else []), *systems]) or None
        else:
            written = template.get_template(llm=self._llm)
        return system, written.replace("{context_str}", "{context}").replace("{query_str}", "{question}")

    def passage(self, node: BaseNode) -> Passage:
        """A node as the core takes it: exactly the text that is prompted, and has to be warmed."""
        return Passage(node.get_content(MetadataMode.LLM), node.node_id, node.ref_doc_id or node.node_id)

    def layout(self, question: str, passages: Sequence[Passage]) -> tuple[PromptLayout, list[str]]:
        """The prompt, and the sources of passages that did not fit.

        Raises:
            PromptError: there is no question, or a passage is empty.
        """
        builder, kept = self.builder, list(passages)
        assert isinstance(self._llm, BlendLLM)
        reserved = self._llm.max_tokens if self._reserve_tokens is None else self._reserve_tokens
        limit = self._llm.metadata.context_window - reserved
        layout = builder.build(question=question, passages=kept, history=self._history)
        while kept and len(layout) > limit:
            kept.pop()
            layout = builder.build(question=question, passages=kept, history=self._history)
        dropped = [str(passage.source) for passage in passages[len(kept) :]]
        if dropped:
            logger.warning("%d of %d nodes did not fit", len(dropped), len(passages))
        return layout, dropped

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes."""
        told: dict[str, Any] = {}
        passages = [self.passage(found.node) for found in nodes]
        options = {**response_kwargs, "passages": passages, "told": told}
        response = super().synthesize(query, nodes, additional_source_nodes, **options)
        return _with_report(response, told)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Async twin of `synthesize`."""
        told: dict[str, Any] = {}
        passages = [self.passage(found.node) for found in nodes]
        options = {**response_kwargs, "passages": passages, "told": told}
        response = await super().asynthesize(query, nodes, additional_source_nodes, **options)
        return _with_report(response, told)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        passages: Sequence[Passage] | None = None,
        told: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts."""
        told = {} if told is None else told
        if not isinstance(self._llm, BlendLLM):
            fields = self._fields(query_str, text_chunks)
            ask = self._llm.stream if self._streaming else self._llm.predict
            return ask(self._text_qa_template, **fields, **response_kwargs)
        layout, told["dropped_nodes"] = self.layout(query_str, passages or [Passage(text) for text in text_chunks])
        if not self._streaming:
            response = self._llm.complete_segments(layout, **response_kwargs)
            told.update(response.raw or {})
            return response.text or "Empty Response"
        pieces = self._llm.stream_segments(layout, **response_kwargs)

        def gen() -> Generator[str, None, None]:
            for piece in pieces:
                told.update(piece.raw or {})
                if piece.delta:
                    yield piece.delta

        return gen()

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        passages: Sequence[Passage] | None = None,
        told: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Async twin of `get_response`."""
        told = {} if told is None else told
        if not isinstance(self._llm, BlendLLM):
            fields = self._fields(query_str, text_chunks)
            ask = self._llm.astream if self._streaming else self._llm.apredict
            return await ask(self._text_qa_template, **fields, **response_kwargs)
        layout, told["dropped_nodes"] = self.layout(query_str, passages or [Passage(text) for text in text_chunks])
        if not self._streaming:
            response = await self._llm.acomplete_segments(layout, **response_kwargs)
            told.update(response.raw or {})
            return response.text or "Empty Response"
        pieces = await self._llm.astream_segments(layout, **response_kwargs)

        async def gen() -> AsyncGenerator[str, None]:
            async for piece in pieces:
                told.update(piece.raw or {})
                if piece.delta:
                    yield piece.delta

        return gen()

    def _fields(self, query_str: str, text_chunks: Sequence[str]) -> dict[str, str]:
        return {"query_str": query_str, "context_str": DEFAULT_SEPARATOR.join(text_chunks)}


def _with_report(response: RESPONSE_TYPE, told: dict[str, Any]) -> RESPONSE_TYPE:
    """The response with what was told; of a stream it fills up while the stream is read."""
    if response.metadata is None:
        response.metadata = {}
    response.metadata["blend_rag"] = told
    return response
