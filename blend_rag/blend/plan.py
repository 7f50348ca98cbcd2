"""Which token of a prompt is hot, reused, a candidate for recomputation, or computed.

Made from a layout and what the store returned; knows no model. Every token is addressed by its position, so prompts may
mix hot, stored and new segments in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.kv import ChunkKV
from blend_rag.layout import PromptLayout, SegmentKind


@dataclass(frozen=True, slots=True)
class Hit:
    """KV of one segment from a store, and the ids it was computed behind (empty: alone)."""

    kv: ChunkKV
    context_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HotKV:
    """Exact rotated KV of the first tokens of a prompt, already where the model runs.

    `keys` and `values` hold one tensor [kv_heads, at least `length` tokens, head_dim] per layer.
    """

    length: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Stored KV laid over tokens [start, end) of a prompt.

    Attributes:
        skip: leading tokens of the stored KV that are not used, because they are hot already.
        rotate_from: position of its first used token when K is rotated; differs from `start` only where position
            correction is switched off.
        exact: the KV was computed behind exactly the tokens that stand before it here.
        chunk: it is a chunk, so its tokens count for the recompute ratio.
    """

    start: int
    end: int
    kv: ChunkKV
    skip: int
    rotate_from: int
    exact: bool
    chunk: bool


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """One prompt, ready to be blended. Position tensors are int64, rising, on the CPU.

    Attributes:
        token_ids: [tokens].
        spans: stored KV in use, left to right, never over hot tokens.
        hot: exact KV of the leading tokens, or None.
        computed: positions computed whatever the policy says.
        candidates: positions of reused chunk tokens whose KV is approximate; at ratio 1 of all reused chunk tokens.
        unseen: positions of new chunks, whose KV is not known before the recompute pass.
        guidance: positions of the latest question.
        budget: how many candidates to recompute.
        exact_length: number of leading tokens whose KV is exact after the blend, whatever is selected.
    """

    token_ids: torch.Tensor
    policy: RecomputePolicy
    spans: tuple[CachedSpan, ...]
    hot: HotKV | None
    computed: torch.Tensor
    candidates: torch.Tensor
    unseen: torch.Tensor
    guidance: torch.Tensor
    budget: int
    exact_length: int
    chunk_offsets: torch.Tensor = field(repr=False)
    """Offset of every candidate inside its chunk, [candidates]."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def hot_length(self) -> int:
        return self.hot.length if self.hot else 0

    @property
    def question_is_last(self) -> bool:
        """Whether the question stands behind every candidate."""
        return not len(self.candidates) or bool(self.guidance.min() > self.candidates.max())

    @classmethod
    def of(
        cls,
        layout: PromptLayout,
        hits: Mapping[int, Hit],
        policy: RecomputePolicy,
        hot: HotKV | None = None,
    ) -> BlendPlan:
        """Plan a prompt.

        Args:
            layout: its segments.
            hits: stored KV by index of the segment.
            policy: ratio and baselines.
            hot: exact KV of its leading tokens; at most all but the last token are used.
        """
        total = len(layout)
        if hot and hot.length >= total:
            hot = HotKV(total - 1, hot.keys, hot.values)
        hot_length = hot.length if hot else 0
        spans = tuple(
            _span(layout, index, hit, policy, hot_length)
            for index, hit in sorted(hits.items())
            if layout.segments[index].end > hot_length
        )
        # numpy: these arrays are so small that starting torch's threads would take most of the time
        is_computed = np.ones(total, dtype=bool)
        is_computed[:hot_length] = False
        is_approximate = np.zeros(total, dtype=bool)
        is_candidate = np.zeros(total, dtype=bool)
        offsets = np.zeros(total, dtype=np.int64)
        for span in spans:
            is_computed[span.start : span.end] = False
            is_approximate[span.start : span.end] = not span.exact
            is_candidate[span.start : span.end] = not span.exact or (span.chunk and policy.ratio == 1.0)
            offsets[span.start : span.end] = np.arange(span.skip, span.kv.num_tokens)
        is_computed[-1], is_candidate[-1] = True, False  # the first answer token needs its hidden state
        is_unseen = np.zeros(total, dtype=bool)
        for segment in layout.of_kind(SegmentKind.CHUNK):
            is_unseen[segment.start : segment.end] = is_computed[segment.start : segment.end]
        is_unseen[-1] = False
        # chunks count whether hot or not: what the engine happens to hold must not change an answer
        known = [layout.segments[index] for index in hits]
        reused_chunk_tokens = sum(len(segment) for segment in known if segment.kind is SegmentKind.CHUNK)
        candidates = np.flatnonzero(is_candidate)
        approximate = np.flatnonzero(is_approximate)
        return cls(
            token_ids=torch.from_numpy(np.array(layout.token_ids, dtype=np.int64)),
            policy=policy,
            spans=spans,
            hot=hot,
            computed=torch.from_numpy(np.flatnonzero(is_computed)),
            candidates=torch.from_numpy(candidates),
            unseen=torch.from_numpy(np.flatnonzero(is_unseen)),
            guidance=_guidance(layout),
            budget=min(round(policy.ratio * reused_chunk_tokens), len(candidates)),
            exact_length=int(approximate[0]) if len(approximate) else total,
            chunk_offsets=torch.from_numpy(offsets[candidates]),
        )


def _span(layout: PromptLayout, index: int, hit: Hit, policy: RecomputePolicy, hot_length: int) -> CachedSpan:
    segment = layout.segments[index]
    if hit.kv.num_tokens != len(segment):
        msg = f"stored KV has {hit.kv.num_tokens} tokens, its segment has {len(segment)}"
        raise ValueError(msg)
    exact = segment.start == len(hit.context_ids) and layout.token_ids[: segment.start] == hit.context_ids
    skip = max(0, hot_length - segment.start)
    computed_at = len(hit.context_ids)  # the position its first token had when it was computed
    return CachedSpan(
        start=segment.start + skip,
        end=segment.end,
        kv=hit.kv,
        skip=skip,
        rotate_from=(segment.start if policy.correct_positions else computed_at) + skip,
        exact=exact,
        chunk=segment.kind is SegmentKind.CHUNK,
    )


def _guidance(layout: PromptLayout) -> torch.Tensor:
    """Positions of the question; where a layout marks none, of its last token."""
    spans = layout.of_kind(SegmentKind.QUESTION)
    if not spans:
        return torch.tensor([len(layout) - 1])
    return torch.cat([torch.arange(segment.start, segment.end) for segment in spans])
