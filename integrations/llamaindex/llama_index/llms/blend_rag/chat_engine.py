"""`BlendContextChatEngine`: a conversation over retrieved nodes whose KV is reused from turn to turn."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore

from llama_index.llms.blend_rag.base import BlendLLM
from llama_index.llms.blend_rag.synthesizer import BlendSynthesizer

DEFAULT_CONDENSE_TEMPLATE = (
    "A conversation and a follow-up question are given. Say the follow-up question so that it can be understood by "
    "itself.\n\nConversation:\n{chat_history}\n\nFollow-up question: {question}\n\nQuestion by itself:"
)


class BlendContextChatEngine(ContextChatEngine):
    """Context chat engine that lays out system text, history, nodes and question so that nodes are reused.

    LlamaIndex's own puts the retrieved text into the system message and builds its own synthesizer; here the nodes
    stand in the last user message, behind a system text that never changes. Made by `from_defaults`, like LlamaIndex's;
    it takes in addition:

    Args:
        condense_question: rewrite the question with the history before retrieving (condense plus context).
        condense_template: with `{chat_history}` and `{question}`.
        qa_template: with `{context_str}` and `{query_str}`.

    Raises:
        TypeError: the LLM is no `BlendLLM`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self._llm, BlendLLM):
            msg = f"BlendContextChatEngine needs a BlendLLM, it got {type(self._llm).__name__}"
            raise TypeError(msg)
        self._condense_question = False
        self._condense_template = DEFAULT_CONDENSE_TEMPLATE
        self._qa_template: PromptTemplate | None = None

    @classmethod
    def from_defaults(
        cls,
        *args: Any,
        condense_question: bool = False,
        condense_template: str = DEFAULT_CONDENSE_TEMPLATE,
        qa_template: PromptTemplate | None = None,
        **kwargs: Any,
    ) -> BlendContextChatEngine:
        """An engine with LlamaIndex's defaults."""
        engine = super().from_defaults(*args, **kwargs)
        assert isinstance(engine, BlendContextChatEngine), "LlamaIndex makes an object of this class"
        engine._condense_question = condense_question
        engine._condense_template = condense_template
        engine._qa_template = qa_template
        return engine

    def _get_response_synthesizer(  # type: ignore[override]
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> BlendSynthesizer:
        assert isinstance(self._llm, BlendLLM), "checked when the engine was made"
        prefix = list(self._prefix_messages)
        system = prefix.pop(0).content if prefix and prefix[0].role is MessageRole.SYSTEM else None
        return BlendSynthesizer(
            self._llm,
            system_prompt=system,
            text_qa_template=self._qa_template,
            streaming=streaming,
            history=[self._llm.core_message(message) for message in (*prefix, *chat_history)],
            callback_manager=self.callback_manager,
        )

    def _get_nodes(self, message: str) -> list[NodeWithScore]:
        return super()._get_nodes(self._condensed(message))

    async def _aget_nodes(self, message: str) -> list[NodeWithScore]:
        history = self._memory.get_all()
        if self._condense_question and history:
            message = (await self._llm.acomplete(self._condense_prompt(history, message))).text.strip() or message
        return await super()._aget_nodes(message)

    def _condensed(self, message: str) -> str:
        history = self._memory.get_all()
        if not (self._condense_question and history):
            return message
        return self._llm.complete(self._condense_prompt(history, message)).text.strip() or message

    def _condense_prompt(self, history: list[ChatMessage], message: str) -> str:
        told = "\n".join(f"{one.role.value}: {one.content}" for one in history)
        return self._condense_template.format(chat_history=told, question=message)
