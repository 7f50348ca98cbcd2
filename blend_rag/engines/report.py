"""From a plan and what was selected to what the user is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from blend_rag.blend.plan import BlendPlan, Hit
from blend_rag.engines.base import ReuseReport, SegmentReport, TokenFate
from blend_rag.layout import PromptLayout, Segment, SegmentKind
from blend_rag.stores import MissReason


@dataclass(frozen=True, slots=True)
class Lookup:
    """Stored KV found for a layout, and for chunks without (or with second choice only) the reason, by segment."""

    hits: dict[int, Hit]
    reasons: dict[int, MissReason]


def make_report(
    layout: PromptLayout,
    plan: BlendPlan,
    recomputed: torch.Tensor,
    found: Lookup,
    ttft_s: float,
    tokenizer: Any,
) -> ReuseReport:
    """Report of one answered prompt; `recomputed` are positions."""
    fates = token_fates(plan, recomputed)
    count = {fate: fates.count(fate) for fate in TokenFate}
    texts = [str(tokenizer.decode([token_id])) for token_id in layout.token_ids]
    return ReuseReport(
        prompt_tokens=len(layout),
        reused_tokens=count[TokenFate.HOT] + count[TokenFate.REUSED],
        hot_tokens=count[TokenFate.HOT],
        recomputed_tokens=count[TokenFate.RECOMPUTED],
        computed_tokens=count[TokenFate.COMPUTED],
        ttft_s=ttft_s,
        exact=len(recomputed) == len(plan.candidates),
        policy=plan.policy,
        segments=segment_reports(layout, fates, found),
        tokens=tuple(zip(texts, fates, strict=True)),
    )


def segment_reports(layout: PromptLayout, fates: list[TokenFate], found: Lookup) -> tuple[SegmentReport, ...]:
    """The same per segment, from the fate of every token."""
    return tuple(
        _segment_report(segment, fates[segment.start : segment.end], found.hits.get(index), found.reasons.get(index))
        for index, segment in enumerate(layout.segments)
    )


def _segment_report(
    segment: Segment, fates: list[TokenFate], hit: Hit | None, reason: MissReason | None
) -> SegmentReport:
    hot = fates.count(TokenFate.HOT)
    context = None
    if hit and segment.kind is SegmentKind.CHUNK:
        context = "prefix" if hit.context_ids else "alone"
    return SegmentReport(
        kind=segment.kind.value,
        source=segment.source,
        tokens=len(segment),
        hot=hot,
        reused=fates.count(TokenFate.REUSED),
        recomputed=fates.count(TokenFate.RECOMPUTED),
        computed=fates.count(TokenFate.COMPUTED),
        context=context,
        reason=reason.value if reason and hot < len(segment) else None,
    )


def token_fates(plan: BlendPlan, recomputed: torch.Tensor) -> list[TokenFate]:
    """What happened to every token of a prompt."""
    fates = [TokenFate.REUSED] * len(plan)
    fates[: plan.hot_length] = [TokenFate.HOT] * plan.hot_length
    for position in plan.computed.tolist():
        fates[position] = TokenFate.COMPUTED
    for position in recomputed.tolist():
        fates[position] = TokenFate.RECOMPUTED
    return fates
