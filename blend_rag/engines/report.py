"""From a plan and what was selected to what the user is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from blend_rag.blend.plan import BlendPlan, Hit
from blend_rag.engines.base import ReuseReport, SegmentReport, TokenFate
from blend_rag.layout import PromptLayout, SegmentKind
from blend_rag.stores import MissReason


def make_report(
    layout: PromptLayout,
    plan: BlendPlan,
    recomputed: torch.Tensor,
    hits: Mapping[int, Hit],
    reasons: Mapping[int, MissReason],
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
        segments=segment_reports(layout, plan, recomputed, hits, reasons),
        tokens=tuple(zip(texts, fates, strict=True)),
    )


def segment_reports(
    layout: PromptLayout,
    plan: BlendPlan,
    recomputed: torch.Tensor,
    hits: Mapping[int, Hit],
    reasons: Mapping[int, MissReason],
) -> tuple[SegmentReport, ...]:
    """The same per segment."""
    fates = token_fates(plan, recomputed)
    found = []
    for index, segment in enumerate(layout.segments):
        inside = fates[segment.start : segment.end]
        hit = hits.get(index)
        behind_prefix = hit is not None and bool(hit.context_ids)
        is_chunk = segment.kind is SegmentKind.CHUNK
        all_hot = all(fate is TokenFate.HOT for fate in inside)
        reason = None if all_hot else reasons.get(index)
        found.append(
            SegmentReport(
                kind=segment.kind.value,
                source=segment.source,
                tokens=len(segment),
                hot=inside.count(TokenFate.HOT),
                reused=inside.count(TokenFate.REUSED),
                recomputed=inside.count(TokenFate.RECOMPUTED),
                computed=inside.count(TokenFate.COMPUTED),
                context=("prefix" if behind_prefix else "alone") if is_chunk and hit else None,
                reason=reason.value if reason else None,
            )
        )
    return tuple(found)


def token_fates(plan: BlendPlan, recomputed: torch.Tensor) -> list[TokenFate]:
    """What happened to every token of a prompt."""
    fates = [TokenFate.REUSED] * len(plan)
    fates[: plan.hot_length] = [TokenFate.HOT] * plan.hot_length
    for position in plan.computed.tolist():
        fates[position] = TokenFate.COMPUTED
    for position in recomputed.tolist():
        fates[position] = TokenFate.RECOMPUTED
    return fates
