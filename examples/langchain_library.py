"""What the LangChain examples share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_huggingface import HuggingFaceEmbeddings
from library import embedding_folder, reference

HUMAN = "{context}\n\n{question}"
GREEDY = {"do_sample": False, "max_new_tokens": 48, "return_full_text": False}


def documents() -> list[Document]:
    """The reference as LangChain's documents."""
    return [Document(text, id=name, metadata={"source": name}) for name, text in reference().items()]


def embeddings() -> Embeddings:
    """all-MiniLM-L6-v2."""
    return HuggingFaceEmbeddings(
        model_name=embedding_folder(), model_kwargs={"device": "cpu", "local_files_only": True}
    )


def joined(fields: Mapping[str, Any]) -> str:
    """The retrieved documents as one text, for an ordinary prompt template."""
    return "\n\n".join(document.page_content for document in fields["context"])
