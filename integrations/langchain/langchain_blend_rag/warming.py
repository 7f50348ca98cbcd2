"""`Warmer`: computes the KV of documents exactly as a prompt will show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from langchain_core.documents import Document

from blend_rag import PromptBuilder, PromptLayout, WarmReport
from blend_rag.engines.base import chunks_with_kv
from langchain_blend_rag.base import BlendModel
from langchain_blend_rag.prompts import BlendPrompt


class Warmer:
    """Warms documents for one model and prompt.

    Args:
        llm: the model that will read them.
        prompt: the prompt they will stand in; its system text and instruction are the prefix they are warmed behind.
    """

    def __init__(self, llm: BlendModel, prompt: BlendPrompt | None = None) -> None:
        self.llm = llm
        self.prompt = prompt or BlendPrompt()

    @property
    def builder(self) -> PromptBuilder:
        """Lays out the prompts that the documents will stand in."""
        return self.llm.runtime.builder(self.prompt.system, self.prompt.template, self.prompt.document_separator)

    def warm(self, documents: Iterable[Document], *, show_progress: bool = False) -> WarmReport:
        """Compute and keep the KV of documents; what is there already is skipped.

        Raises:
            PromptError: a document has no text.
            PromptTooLongError: a document does not fit into the model's context.
        """
        passages = [self.prompt.passage(document) for document in documents]
        report: WarmReport = self.llm.engine.warm(self.builder, passages, show_progress=show_progress)
        return report

    async def awarm(self, documents: Iterable[Document], *, show_progress: bool = False) -> WarmReport:
        """Async twin of `warm`."""
        passages = [self.prompt.passage(document) for document in documents]
        report: WarmReport = await self.llm.engine.awarm(self.builder, passages, show_progress=show_progress)
        return report

    def forget(self, ids: Iterable[str]) -> int:
        """Delete KV that only these documents use; how many chunks.

        Raises:
            StoreError: some may still be there; try again.
        """
        return sum(self.llm.engine.forget_document(name) for name in ids)

    async def aforget(self, ids: Iterable[str]) -> int:
        """Async twin of `forget`."""
        return sum([await self.llm.engine.aforget_document(name) for name in ids])

    def have_kv(self, documents: Sequence[Document]) -> list[bool]:
        """Which documents would be reused now."""
        if not documents:
            return []
        layout = self._layout(documents)
        return chunks_with_kv(layout, self.llm.engine.lookup(layout))

    async def ahave_kv(self, documents: Sequence[Document]) -> list[bool]:
        """Async twin of `have_kv`."""
        if not documents:
            return []
        layout = self._layout(documents)
        return chunks_with_kv(layout, await self.llm.engine.alookup(layout))

    def _layout(self, documents: Sequence[Document]) -> PromptLayout:
        return self.builder.build(question="?", passages=[self.prompt.passage(document) for document in documents])
