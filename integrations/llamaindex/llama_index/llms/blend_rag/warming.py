"""Warming on ingestion: a transformation for pipelines, and a wrapper of any vector store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from blend_rag import PromptLayout, WarmReport
from blend_rag.engines.base import chunks_with_kv
from llama_index.llms.blend_rag.base import BlendLLM
from llama_index.llms.blend_rag.synthesizer import BlendSynthesizer

logger = logging.getLogger(__name__)


class Warmer:
    """Computes the KV of nodes exactly as a synthesizer will prompt them.

    Args:
        synthesizer: with a `BlendLLM`; its system text and template are what nodes are warmed behind.

    Raises:
        TypeError: the synthesizer's model is another.
    """

    def __init__(self, synthesizer: BlendSynthesizer) -> None:
        if not isinstance(synthesizer.llm, BlendLLM):
            msg = f"{type(synthesizer.llm).__name__} keeps no KV: warm with a synthesizer that has a BlendLLM"
            raise TypeError(msg)
        self.synthesizer = synthesizer
        self.engine = synthesizer.llm.engine
        self.failures = 0

    def warm(self, nodes: Iterable[BaseNode], *, show_progress: bool = False) -> WarmReport:
        """Compute and keep the KV of nodes; what is there already is skipped.

        Raises:
            PromptError: a node has no text.
            PromptTooLongError: a node does not fit into the model's context.
        """
        passages = [self.synthesizer.passage(node) for node in nodes]
        report: WarmReport = self.engine.warm(self.synthesizer.builder, passages, show_progress=show_progress)
        return report

    async def awarm(self, nodes: Iterable[BaseNode], *, show_progress: bool = False) -> WarmReport:
        """Async twin of `warm`."""
        passages = [self.synthesizer.passage(node) for node in nodes]
        report: WarmReport = await self.engine.awarm(self.synthesizer.builder, passages, show_progress=show_progress)
        return report

    def forget(self, documents: Iterable[str]) -> int:
        """Delete KV that only these documents use; how many chunks.

        Raises:
            StoreError: some may still be there; try again.
        """
        return sum(self.engine.forget_document(document) for document in documents)

    async def aforget(self, documents: Iterable[str]) -> int:
        """Async twin of `forget`."""
        return sum([await self.engine.aforget_document(document) for document in documents])

    def have_kv(self, nodes: Sequence[BaseNode]) -> list[bool]:
        """Which nodes would be reused now."""
        if not nodes:
            return []
        layout = self._layout(nodes)
        return chunks_with_kv(layout, self.engine.lookup(layout))

    async def ahave_kv(self, nodes: Sequence[BaseNode]) -> list[bool]:
        """Async twin of `have_kv`."""
        if not nodes:
            return []
        layout = self._layout(nodes)
        return chunks_with_kv(layout, await self.engine.alookup(layout))

    def _layout(self, nodes: Sequence[BaseNode]) -> PromptLayout:
        passages = [self.synthesizer.passage(node) for node in nodes]
        return self.synthesizer.builder.build(question="?", passages=passages)

    def failed(self, error: Exception) -> None:
        """Count and log a warm-up that did not work; the nodes are stored, and computed when first used."""
        self.failures += 1
        logger.warning("nodes are stored, their KV is not (%s: %s)", type(error).__name__, error)


class WarmTransform(TransformComponent):
    """Last transformation of an ingestion pipeline or index: warms the nodes and hands them on unchanged.

    A pipeline's own cache skips it on a rerun, and `insert_nodes` does not run it: `WarmingVectorStore` sees all.

    Args:
        warmer: computes the KV.
    """

    _warmer: Warmer = PrivateAttr()

    def __init__(self, warmer: Warmer) -> None:
        super().__init__()
        self._warmer = warmer

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex knows it."""
        return "WarmTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes."""
        try:
            self._warmer.warm(nodes, show_progress=bool(kwargs.get("show_progress")))
        except Exception as error:
            self._warmer.failed(error)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Async twin of `__call__`."""
        try:
            await self._warmer.awarm(nodes, show_progress=bool(kwargs.get("show_progress")))
        except Exception as error:
            self._warmer.failed(error)
        return nodes


class WarmingVectorStore(BasePydanticVectorStore):
    """Wraps any vector store: nodes that are added are warmed, KV of deleted documents is dropped.

    Args:
        store: the vector store that holds the nodes.
        warmer: computes their KV.
        show_progress: a bar over tokens while warming.
    """

    stores_text: bool = False
    _store: BasePydanticVectorStore = PrivateAttr()
    _warmer: Warmer = PrivateAttr()
    _show_progress: bool = PrivateAttr()

    def __init__(self, store: BasePydanticVectorStore, warmer: Warmer, *, show_progress: bool = False) -> None:
        super().__init__(stores_text=store.stores_text, is_embedding_query=store.is_embedding_query)
        self._store = store
        self._warmer = warmer
        self._show_progress = show_progress

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex knows it."""
        return "WarmingVectorStore"

    @property
    def client(self) -> Any:
        """The wrapped store's client."""
        return self._store.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes, then warm them."""
        ids = self._store.add(list(nodes), **kwargs)
        try:
            self._warmer.warm(nodes, show_progress=self._show_progress)
        except Exception as error:
            self._warmer.failed(error)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Async twin of `add`."""
        ids = await self._store.async_add(list(nodes), **kwargs)
        try:
            await self._warmer.awarm(nodes, show_progress=self._show_progress)
        except Exception as error:
            self._warmer.failed(error)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, then the KV that nobody else uses."""
        self._store.delete(ref_doc_id, **delete_kwargs)
        try:
            self._warmer.forget([ref_doc_id])
        except Exception as error:
            self._warmer.failed(error)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Async twin of `delete`."""
        await self._store.adelete(ref_doc_id, **delete_kwargs)
        try:
            await self._warmer.aforget([ref_doc_id])
        except Exception as error:
            self._warmer.failed(error)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes, and KV of those that belong to no document; other KV goes with its document."""
        self._store.delete_nodes(node_ids, filters, **delete_kwargs)
        try:
            self._warmer.forget(node_ids or ())
        except Exception as error:
            self._warmer.failed(error)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Async twin of `delete_nodes`."""
        await self._store.adelete_nodes(node_ids, filters, **delete_kwargs)
        try:
            await self._warmer.aforget(node_ids or ())
        except Exception as error:
            self._warmer.failed(error)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The wrapped store's nodes."""
        return self._store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Async twin of `get_nodes`."""
        return await self._store.aget_nodes(node_ids, filters)

    def clear(self) -> None:
        """Clear the wrapped store; KV is evicted in its own time."""
        self._store.clear()

    async def aclear(self) -> None:
        """Async twin of `clear`."""
        await self._store.aclear()

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the wrapped store."""
        return self._store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Async twin of `query`."""
        return await self._store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the wrapped store."""
        self._store.persist(persist_path, fs)
