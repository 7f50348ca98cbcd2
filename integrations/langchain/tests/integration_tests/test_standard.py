"""LangChain's own integration tests, on the real embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)

from blend_rag import MemoryStore
from blend_rag.engines.transformers import TransformersEngine
from langchain_blend_rag import BlendPrompt, BlendRetriever, ChatBlend, Warmer, WarmingVectorStore


@pytest.mark.slow
class TestChatBlend(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _engine(self, engine: TransformersEngine) -> None:
        type(self).engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def supports_model_override(self) -> bool:
        return False  # an engine holds one model

    @property
    def has_tool_calling(self) -> bool:
        return False  # SmolLM2's chat template shows no tools

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": [], "stream": []}


class TestBlendRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return BlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
        store.add_documents([Document(f"document {number}") for number in range(8)])
        return {"retriever": store.as_retriever(search_kwargs={"k": 8})}

    @property
    def retriever_query_example(self) -> str:
        return "document 3"


class TestWarmingVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, engine: TransformersEngine) -> Iterator[VectorStore]:
        warming = TransformersEngine.from_loaded(
            engine.decoder.model, engine.tokenizer, store=MemoryStore(), self_test=False
        )
        store = WarmingVectorStore(
            InMemoryVectorStore(self.get_embeddings()), Warmer(ChatBlend(engine=warming), BlendPrompt())
        )
        yield store
        assert store.warm_failures == 0
