"""Time to first token: measured interleaved in one process, and what arithmetic alone would allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from blend_rag.blend.plan import BlendPlan
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.layout import PromptLayout


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of several runs."""

    median_s: float
    min_s: float
    max_s: float


def time_interleaved(arms: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, Timing]:
    """Run all arms in turn, `repeats` times after `warmup` rounds, so that a drifting machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(warmup + repeats):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if round_number >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing(statistics.median(runs), min(runs), max(runs)) for name, runs in seconds.items()}


@torch.no_grad()
def plain_prefill(engine: TransformersEngine, layout: PromptLayout) -> torch.Tensor:
    """Next-token logits [vocabulary] by transformers' own forward with its cache: the arm to beat."""
    ids = torch.tensor([layout.token_ids], device=engine.device)
    logits: torch.Tensor = engine.decoder.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


def ideal_speedup(engine: TransformersEngine, plan: BlendPlan) -> float:
    """FLOPs of full prefill over FLOPs of the blend, with an exact mask and every key block skipped that can be.

    Counts matrix products and attention of all layers for the tokens that the plan computes, plus the score pass of
    its selector; the output head is left out on both sides.
    """
    policy = plan.policy
    config = engine.decoder.model.config
    shape = engine.decoder.shape
    width = shape.heads * shape.head_dim
    hidden, total = config.hidden_size, len(plan)
    project = hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    weights = project + width * hidden + 3 * hidden * config.intermediate_size

    def layers(count: float, rows: torch.Tensor) -> float:
        return float(count * (2 * weights * len(rows) + 4 * width * (rows + 1).sum()))

    full = layers(shape.layers, torch.arange(total))
    spread = torch.linspace(0, max(len(plan.candidates) - 1, 0), plan.budget).long()  # as if selected evenly
    rows = torch.cat([plan.computed, plan.candidates[spread]])
    blended = layers(shape.layers, rows)
    scoring = 0 < plan.budget < len(plan.candidates)
    if scoring and policy.selector in ("k-deviation", "v-deviation"):
        scored = torch.cat([plan.computed, plan.candidates])
        blended += layers(policy.check_layer, scored) + 2 * project * len(scored)
    elif scoring and policy.selector == "query-guided":
        blended += layers(shape.layers, plan.computed[~torch.isin(plan.computed, plan.unseen)])
    elif scoring and policy.selector == "oracle":
        blended += full
    return float(full / blended)


def blended_first_token(
    engine: TransformersEngine, layout: PromptLayout, policy: RecomputePolicy
) -> Callable[[], object]:
    """An arm that answers with one token under `policy`."""
    return lambda: engine.generate(layout, max_tokens=1, policy=policy)
