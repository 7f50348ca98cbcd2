"""Reuse the KV of retrieved chunks anywhere in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.engines.base import (
    Engine,
    Generation,
    GenerationChunk,
    ReuseReport,
    SamplingParams,
    SegmentReport,
    WarmReport,
)
from blend_rag.errors import BlendRagError
from blend_rag.layout import Message, Passage, Passages, PromptBuilder, PromptLayout, Segment, SegmentKind
from blend_rag.stores import DiskStore, KVStore, MemoryStore, MissReason, StoreStats, TieredStore, open_store

if TYPE_CHECKING:
    from blend_rag.engines.transformers import TransformersEngine

__version__ = "0.1.0"

__all__ = [
    "FULL_PREFILL",
    "BlendRagError",
    "DiskStore",
    "Engine",
    "Generation",
    "GenerationChunk",
    "KVStore",
    "MemoryStore",
    "Message",
    "MissReason",
    "Passage",
    "Passages",
    "PromptBuilder",
    "PromptLayout",
    "RecomputePolicy",
    "ReuseReport",
    "SamplingParams",
    "Segment",
    "SegmentKind",
    "SegmentReport",
    "StoreStats",
    "TieredStore",
    "WarmReport",
    "load_engine",
    "open_store",
]


def load_engine(model: str | Path | None = None, **options: Any) -> TransformersEngine:
    """Load the embedded engine; arguments and errors as in `blend_rag.engines.transformers.TransformersEngine`."""
    from blend_rag.engines.transformers import TransformersEngine  # transformers takes seconds to import

    return TransformersEngine(model, **options)
