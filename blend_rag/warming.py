"""Documents to chunk KV in a store. Knows files and engines; the engine computes, the store keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blend_rag.corpus import load_documents
from blend_rag.engines.base import Engine, WarmReport
from blend_rag.layout import PromptBuilder


@dataclass(frozen=True, slots=True)
class WarmedDocuments:
    """What warming did, and how many documents and passages it was about."""

    documents: int
    passages: int
    report: WarmReport


def warm_documents(
    engine: Engine,
    prompts: PromptBuilder,
    paths: Iterable[Path],
    *,
    context: str = "prefix",
    show_progress: bool = False,
) -> WarmedDocuments:
    """Cut text files and folders into passages and keep their KV in the engine's store.

    What the store has is skipped, so a run that was killed goes on where it stopped, and processes that warm the same
    documents share the work. A document's id is its absolute path.

    Args:
        engine: computes, and holds the store.
        prompts: lays out the prompts these passages will be used in.
        paths: files, or folders that are searched for `.txt`, `.md` and `.rst`.
        context: "prefix" (behind the builder's prefix) or "alone".
        show_progress: a bar over tokens.

    Raises:
        CorpusError: a path is missing or unreadable, or there is no text at all.
        PromptTooLongError: a passage does not fit into the model's context.
    """
    passages = load_documents(paths, prompts.tokenizer.count)
    report = engine.warm(prompts, passages, context=context, show_progress=show_progress)
    return WarmedDocuments(len({passage.document for passage in passages}), len(passages), report)
