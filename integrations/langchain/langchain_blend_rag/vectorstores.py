"""`WarmingVectorStore`: a vector store whose documents have their KV computed when they are added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_blend_rag.warming import Warmer

logger = logging.getLogger(__name__)


class WarmingVectorStore(VectorStore):
    """Wraps any vector store; adding documents also warms them, deleting them also drops KV that nobody else uses.

    With `langchain_core.indexing.index` only new and changed documents reach it, so only they are warmed. A warm-up
    that fails is logged and counted in `warm_failures`, not raised: the documents are stored, and will be computed when
    they are first used.

    Args:
        store: the vector store that holds the documents.
        warmer: computes their KV.
        show_progress: a bar over tokens while warming.

    Example:
        ```python
        store = WarmingVectorStore(InMemoryVectorStore(embeddings), Warmer(chat, prompt))
        store.add_documents(documents)
        ```
    """

    def __init__(self, store: VectorStore, warmer: Warmer, *, show_progress: bool = False) -> None:
        self.store = store
        self.warmer = warmer
        self.warm_failures = 0
        self._show_progress = show_progress

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped store offers."""
        if name == "store":  # not set yet
            raise AttributeError(name)
        return getattr(self.store, name)

    @property
    def embeddings(self) -> Embeddings | None:
        """The wrapped store's embeddings."""
        return self.store.embeddings

    # Adding and deleting

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Store documents, then warm them."""
        ids = self.store.add_documents(documents, **kwargs)
        try:
            self.warmer.warm(_named(documents, ids), show_progress=self._show_progress)
        except Exception as error:
            self._failed(error)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Async twin of `add_documents`."""
        ids = await self.store.aadd_documents(documents, **kwargs)
        try:
            await self.warmer.awarm(_named(documents, ids), show_progress=self._show_progress)
        except Exception as error:
            self._failed(error)
        return ids

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store texts, then warm them."""
        return self.add_documents(_documents(texts, metadatas, ids), **_with_ids(ids, kwargs))

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Async twin of `add_texts`."""
        return await self.aadd_documents(_documents(texts, metadatas, ids), **_with_ids(ids, kwargs))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, then the KV that nobody else uses."""
        deleted = self.store.delete(ids, **kwargs)
        if deleted is not False:
            try:
                self.warmer.forget(ids or ())
            except Exception as error:
                self._failed(error)
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Async twin of `delete`."""
        deleted = await self.store.adelete(ids, **kwargs)
        if deleted is not False:
            try:
                await self.warmer.aforget(ids or ())
            except Exception as error:
                self._failed(error)
        return deleted

    def _failed(self, error: Exception) -> None:
        self.warm_failures += 1
        logger.warning("documents are stored, their KV is not (%s: %s)", type(error).__name__, error)

    # Searching: the wrapped store's own

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.store.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.store.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self.store.similarity_search(query, k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return await self.store.asimilarity_search(query, k, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return self.store.similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        return await self.store.asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return self.store.similarity_search_by_vector(embedding, k, **kwargs)

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return await self.store.asimilarity_search_by_vector(embedding, k, **kwargs)

    def max_marginal_relevance_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        return self.store.max_marginal_relevance_search(*args, **kwargs)

    async def amax_marginal_relevance_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        return await self.store.amax_marginal_relevance_search(*args, **kwargs)

    def max_marginal_relevance_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        return self.store.max_marginal_relevance_search_by_vector(*args, **kwargs)

    async def amax_marginal_relevance_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        return await self.store.amax_marginal_relevance_search_by_vector(*args, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.store._select_relevance_score_fn()

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> WarmingVectorStore:
        """Not for this class.

        Raises:
            NotImplementedError: always.
        """
        msg = "make the vector store first, then WarmingVectorStore(store, warmer), then add_texts"
        raise NotImplementedError(msg)


def _documents(texts: Iterable[str], metadatas: list[dict[str, Any]] | None, ids: list[str] | None) -> list[Document]:
    listed = list(texts)
    found = metadatas or [{} for _ in listed]
    names: Sequence[str | None] = ids or [None] * len(listed)
    return [
        Document(page_content=text, metadata=metadata, id=name)
        for text, metadata, name in zip(listed, found, names, strict=True)
    ]


def _with_ids(ids: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if ids is None else {**kwargs, "ids": ids}


def _named(documents: Sequence[Document], ids: Sequence[str]) -> list[Document]:
    """Documents under the ids the store gave them, with which they will be retrieved and deleted."""
    return [
        document if document.id == name else document.model_copy(update={"id": name})
        for document, name in zip(documents, ids, strict=True)
    ]
