"""`BlendMiddleware`: agents whose retrieved tool results keep their passages. Needs `langchain`."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, BaseMessage, ToolMessage

from blend_rag import Passage, Passages
from langchain_blend_rag.base import BlendModel
from langchain_blend_rag.segments import MARK, mark, original_documents, text_of


class BlendMiddleware(AgentMiddleware[Any, Any, Any]):
    """Marks the passages in tool results that come with their documents as an artifact.

    `create_retriever_tool(..., response_format="content_and_artifact")` makes such results; results of
    `BlendRetriever(in_band=True)` carry their borders by themselves. Texts of documents that a tool has changed stay
    ordinary text.

    Args:
        unsupported_model_behavior: what to do with a model that is none of ours: "ignore", "warn" or "raise".

    Raises:
        ValueError: another behaviour, or with "raise", another model.
    """

    def __init__(self, unsupported_model_behavior: Literal["ignore", "warn", "raise"] = "warn") -> None:
        if unsupported_model_behavior not in ("ignore", "warn", "raise"):
            msg = f"unsupported_model_behavior={unsupported_model_behavior!r}: choose ignore, warn or raise"
            raise ValueError(msg)
        super().__init__()
        self.unsupported_model_behavior = unsupported_model_behavior

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Mark passages, then go on."""
        return handler(self._marked(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Async twin of `wrap_model_call`."""
        return await handler(self._marked(request))

    def _marked(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if isinstance(request.model, BlendModel):
            return request.override(messages=[_mark(message) for message in request.messages])
        if self.unsupported_model_behavior != "ignore":
            msg = f"{type(request.model).__name__} does not reuse KV: BlendMiddleware is for ChatBlend"
            if self.unsupported_model_behavior == "raise":
                raise ValueError(msg)
            warnings.warn(msg, stacklevel=3)
        return request


def _mark(message: AnyMessage) -> AnyMessage:
    """A tool's message with its documents' places, if they are in its text one after the other."""
    if not isinstance(message, ToolMessage) or MARK in message.additional_kwargs:
        return message
    documents = message.artifact if isinstance(message.artifact, Sequence) else ()
    if not documents or not all(isinstance(document, Document) for document in documents):
        return message
    parts = _parts(message, original_documents(documents))
    if parts is None:
        return message
    _, found = mark(parts, "")
    return message.model_copy(update={"additional_kwargs": {**message.additional_kwargs, MARK: found}})


def _parts(message: BaseMessage, documents: Sequence[Document]) -> list[str | Passages] | None:
    text = text_of(message)
    parts: list[str | Passages] = []
    at = 0
    for document in documents:
        start = text.find(document.page_content, at)
        if start < 0 or not document.page_content:
            return None
        if start > at:
            parts.append(text[at:start])
        source = document.metadata.get("source")
        name = document.id or (None if source is None else str(source))
        passage = Passage(document.page_content, None if source is None else str(source), name)
        parts.append(Passages((passage,)))
        at = start + len(document.page_content)
    return [*parts, text[at:]] if text[at:] else parts
