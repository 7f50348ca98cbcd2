"""LangChain components that reuse the KV of retrieved chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_blend_rag.chat_models import ChatBlend
from langchain_blend_rag.llms import BlendLLM
from langchain_blend_rag.prompts import BlendPrompt, BlendPromptValue
from langchain_blend_rag.retrievers import BlendRetriever
from langchain_blend_rag.segments import original_documents
from langchain_blend_rag.vectorstores import WarmingVectorStore
from langchain_blend_rag.warming import Warmer

if TYPE_CHECKING:
    from langchain_blend_rag.middleware import BlendMiddleware

__version__ = "0.1.0"

__all__ = [
    "BlendLLM",
    "BlendMiddleware",
    "BlendPrompt",
    "BlendPromptValue",
    "BlendRetriever",
    "ChatBlend",
    "Warmer",
    "WarmingVectorStore",
    "original_documents",
]


def __getattr__(name: str) -> Any:
    if name == "BlendMiddleware":  # needs langchain, which the rest does not
        from langchain_blend_rag.middleware import BlendMiddleware

        return BlendMiddleware
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
