"""A small random prompt, on which engines prove that they blend a model rightly."""

from __future__ import annotations

import torch

from blend_rag.layout import PromptLayout, Segment, SegmentKind

_SIZES = (("prefix", 12), ("chunk", 20), ("chunk", 20), ("question", 8))


def sample_layout(vocabulary: int) -> PromptLayout:
    """Prefix, two chunks and a question of random ids below `vocabulary`; the same every time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (sum(size for _, size in _SIZES),), generator=generator).tolist()
    segments, at = [], 0
    for kind, size in _SIZES:
        segments.append(Segment(SegmentKind(kind), at, at + size, ""))
        at += size
    return PromptLayout(tuple(ids), tuple(segments))
