"""The policies a fidelity run compares: baselines that show what each part is worth, and rules over ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.blend.selectors import make_selector

FULL = "full"
REUSE = "reuse"
BASELINE = "k-deviation"
"""The rule that others are compared with, pair by pair: CacheBlend's own."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, and the name it has in tables: its rule's, "full", or "reuse" where nothing is recomputed."""

    selector: str
    policy: RecomputePolicy

    @property
    def key(self) -> str:
        """Tells arms apart, for example `first-k 0.15 prefix`."""
        policy = self.policy
        parts = [self.selector, f"{policy.ratio:g}", policy.context]
        if self.selector == BASELINE and policy.check_layer != RecomputePolicy().check_layer:
            parts.append(f"layer {policy.check_layer}")
        if policy.schedule:
            parts.append("narrowed")
        if not policy.correct_positions:
            parts.append("positions not corrected")
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """What identifies it in a report."""
        policy = self.policy
        return {
            "selector": self.selector,
            "ratio": policy.ratio,
            "context": policy.context,
            "check_layer": policy.check_layer,
            "schedule": [list(step) for step in policy.schedule],
            "correct_positions": policy.correct_positions,
        }


FULL_ARM = Arm(FULL, FULL_PREFILL)
REUSE_ARM = Arm(REUSE, RecomputePolicy(ratio=0.0, context="alone"))
"""What gaps are measured by: nothing recomputed, positions corrected, chunks computed alone."""


def make_arms(
    ratios: Sequence[float], selectors: Sequence[str], *, alone: bool = True, seed: int = 0
) -> tuple[Arm, ...]:
    """Baselines, every rule at every ratio, and variants at the first ratio; each arm once.

    Args:
        ratios: shares to recompute.
        selectors: names of rules.
        alone: measure rules at the first ratio over chunks computed alone, too.
        seed: of the random rule.

    Raises:
        PolicyError: a ratio or a name makes no sense.
    """
    arms = [
        FULL_ARM,
        Arm(REUSE, replace(REUSE_ARM.policy, correct_positions=False)),
        REUSE_ARM,
        Arm(REUSE, RecomputePolicy(ratio=0.0)),
    ]
    rules = [RecomputePolicy(selector=name, seed=seed) for name in selectors]
    for rule in rules:
        make_selector(rule)
    arms += [Arm(rule.selector, replace(rule, ratio=ratio)) for ratio in ratios for rule in rules]
    for rule in rules if alone and ratios else []:
        arms.append(Arm(rule.selector, replace(rule, ratio=ratios[0], context="alone")))
    if BASELINE in selectors and ratios and 0 < ratios[0] <= 0.5:
        narrowed = RecomputePolicy(
            ratio=ratios[0], selector=BASELINE, check_layer=3, schedule=((1, 2 * ratios[0]),), seed=seed
        )
        arms.append(Arm(BASELINE, narrowed))
    default = RecomputePolicy()
    arms.append(Arm(default.selector, default))
    unique = {(arm.selector, arm.policy): arm for arm in arms if arm.policy.ratio or arm.selector == REUSE}
    return tuple(unique.values())
