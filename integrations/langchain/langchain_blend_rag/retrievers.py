"""`BlendRetriever`: puts borders between retrieved chunks, so that nobody has to type them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from blend_rag.in_band import IN_BAND_SEPARATOR, enclose
from langchain_blend_rag.segments import MARK
from langchain_blend_rag.warming import Warmer


class BlendRetriever(BaseRetriever):
    """Wraps any retriever.

    With `BlendPrompt` or `BlendMiddleware` documents travel as they are, and this only removes duplicates and orders.
    For chains that join documents to one string (`create_stuff_documents_chain`, `create_retriever_tool`, a server
    behind an ordinary client), `in_band=True` hands out documents whose text carries its borders; `ChatBlend` and
    `BlendLLM` take them out again. `original_documents` gives back the documents as they were.

    Example:
        ```python
        retriever = BlendRetriever(retriever=store.as_retriever(search_kwargs={"k": 6}), in_band=True)
        ```

    Raises:
        ValueError: `cached_first` without a warmer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: BaseRetriever
    """Where documents come from."""
    k: int | None = None
    """How many documents to hand out, after duplicates were removed; a call's own `k` replaces it."""
    in_band: bool = False
    """Put borders into the text of the documents."""
    in_band_separator: str = IN_BAND_SEPARATOR
    """The border; the model's own must be the same."""
    remove_duplicates: bool = True
    """Hand out each text once."""
    cached_first: bool = False
    """Put documents whose KV is there in front; the order within both groups stays."""
    warmer: Warmer | None = Field(default=None, exclude=True, repr=False)
    """Knows which documents have KV; needed for `cached_first`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cached_first and self.warmer is None:
            msg = "cached_first needs warmer=Warmer(llm, prompt), which knows what has KV"
            raise ValueError(msg)
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        k = kwargs.pop("k", self.k)
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **self._asked(k, kwargs))
        documents = self._chosen(found, k)
        has_kv = self.warmer.have_kv(documents) if self.cached_first and self.warmer else []
        return self._hand_out(documents, has_kv)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        k = kwargs.pop("k", self.k)
        found = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **self._asked(k, kwargs))
        documents = self._chosen(found, k)
        has_kv = await self.warmer.ahave_kv(documents) if self.cached_first and self.warmer else []
        return self._hand_out(documents, has_kv)

    def _asked(self, k: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if k is None else {**kwargs, "k": k}

    def _chosen(self, found: Sequence[Document], k: int | None) -> list[Document]:
        documents = _unique(found) if self.remove_duplicates else list(found)
        return documents if k is None else documents[:k]

    def _hand_out(self, documents: list[Document], has_kv: Sequence[bool]) -> list[Document]:
        if has_kv:
            ranked = sorted(range(len(documents)), key=lambda number: not has_kv[number])
            documents = [documents[number] for number in ranked]
        return [self._with_borders(document) for document in documents] if self.in_band else documents

    def _with_borders(self, document: Document) -> Document:
        return document.model_copy(
            update={
                "page_content": enclose(document.page_content, self.in_band_separator),
                "metadata": {**document.metadata, MARK: {"text": document.page_content}},
            }
        )


def _unique(documents: Iterable[Document]) -> list[Document]:
    first: dict[str, Document] = {}
    for document in documents:
        first.setdefault(document.page_content, document)
    return list(first.values())
