"""Reuse the KV of retrieved chunks anywhere in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

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
from blend_rag.errors import BlendRagError, PolicyError
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


@overload
def load_engine(
    model: str | Path | None = None, *, engine: Literal["transformers"] = ..., **options: Any
) -> TransformersEngine: ...


@overload
def load_engine(model: str | Path | None = None, *, engine: str | None, **options: Any) -> Engine: ...


def load_engine(model: str | Path | None = None, *, engine: str | None = "transformers", **options: Any) -> Engine:
    """Load an engine.

    Args:
        model: a local folder or GGUF file, a hub id, or None for the packaged SmolLM2-135M-Instruct.
        engine: "transformers" (in this process, on CPU or GPU), "vllm" (vLLM in this process), or the URL of a running
            vLLM server with the connector.
        options: of `blend_rag.engines.transformers.TransformersEngine`, `blend_rag.engines.vllm.VLLMEngine` or
            `blend_rag.engines.server.ServerEngine`, which also say what is raised.

    Raises:
        PolicyError: there is no such engine, or it has no such option.
    """
    name = engine or "transformers"
    if name == "transformers":
        from blend_rag.engines.transformers import TransformersEngine  # transformers takes seconds to import

        return TransformersEngine(model, **options)
    if name == "vllm":
        from blend_rag.engines.vllm import VLLMEngine

        return VLLMEngine(model, **options)
    if name.startswith(("http://", "https://")):
        from blend_rag.engines.server import ServerEngine

        kept = [option for option in ("store", "store_dtype", "allow_unsigned") if option in options]
        if kept:
            msg = f"the server at {name} keeps the KV: pass {kept[0]} to the server, not here"
            raise PolicyError(msg)
        options.pop("show_progress", None)
        return ServerEngine(name, model, **options)
    msg = f"there is no engine {name!r}: choose 'transformers', 'vllm', or a server's URL"
    raise PolicyError(msg)
