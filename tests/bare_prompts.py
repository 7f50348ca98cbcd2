"""Prompts of raw token ids on a decoder: the smallest thing that can be blended."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from blend_rag.blend.decoder import Decoder
from blend_rag.blend.passes import compute_chunk_kv
from blend_rag.blend.plan import BlendPlan, Hit, HotKV
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.layout import PromptLayout, Segment, SegmentKind
from tests.tiny_models import VOCABULARY

Spec = Sequence[tuple[str, int]]
"""Kind and number of tokens of each segment."""

RAG: Spec = (("prefix", 5), ("chunk", 11), ("separator", 1), ("chunk", 9), ("chunk", 14), ("question", 6))


def bare_layout(spec: Spec = RAG, seed: int = 0) -> PromptLayout:
    """A layout of random ids; the leading prefix segment is its context."""
    rng = random.Random(seed)
    segments, at = [], 0
    for kind, size in spec:
        segments.append(Segment(SegmentKind(kind), at, at + size, ""))
        at += size
    ids = tuple(rng.randrange(3, VOCABULARY) for _ in range(at))
    context = ids[: spec[0][1]] if spec[0][0] == "prefix" else ()
    return PromptLayout(ids, tuple(segments), context)


def stored_kv(
    decoder: Decoder,
    layout: PromptLayout,
    *,
    context: str = "alone",
    dtype: torch.dtype = torch.float32,
    only: Sequence[int] | None = None,
) -> dict[int, Hit]:
    """KV of the layout's chunks (or of those segments in `only`), each computed alone or behind the prefix."""
    chosen = [i for i, s in enumerate(layout.segments) if s.kind is SegmentKind.CHUNK and (only is None or i in only)]
    context_ids = layout.context_ids if context == "prefix" else ()
    hot = exact_kv(decoder, context_ids) if context_ids else None
    chunks = [layout.ids(layout.segments[i]) for i in chosen]
    found = compute_chunk_kv(decoder, chunks, hot, dtype) if chunks else []
    return {i: Hit(kv, context_ids) for i, kv in zip(chosen, found, strict=True)}


def exact_kv(decoder: Decoder, token_ids: Sequence[int]) -> HotKV:
    """Exact rotated KV of a beginning, by the stock model's own cache."""
    ids = torch.tensor([list(token_ids)])
    cache = decoder.model(input_ids=ids, use_cache=True).cache  # type: ignore[attr-defined]
    layers = cache.layers
    return HotKV(len(token_ids), tuple(layer.keys[0] for layer in layers), tuple(layer.values[0] for layer in layers))


def plain_logits(decoder: Decoder, layout: PromptLayout) -> torch.Tensor:
    """Last logits of the stock model, [vocabulary]."""
    with torch.no_grad():
        return decoder.model(input_ids=torch.tensor([layout.token_ids], device=decoder.device)).logits[0, -1].float()  # type: ignore


def make_plan(layout: PromptLayout, hits: dict[int, Hit], hot: HotKV | None = None, **policy: object) -> BlendPlan:
    return BlendPlan.of(layout, hits, RecomputePolicy(**policy), hot)  # type: ignore[arg-type]
