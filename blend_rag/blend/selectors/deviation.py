"""Tokens whose K or V changed most, seen at an early layer: CacheBlend's own rule (arXiv 2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.probe import Deviation, Probe
from blend_rag.blend.selectors.base import Selector, top


@dataclass(frozen=True, slots=True)
class KeyDeviation(Selector):
    """Largest L2 distance between fresh and stored un-rotated K at `check_layer`.

    `schedule` narrows the candidates first, each step with fewer tokens and more layers: the paper's gradual
    filtering, as (layer, ratio) pairs.
    """

    check_layer: int = 1
    schedule: tuple[tuple[int, float], ...] = ()

    def measure(self, deviation: Deviation) -> torch.Tensor:
        return deviation.key

    def score(self, probe: Probe) -> torch.Tensor:
        return self.measure(probe.deviation(self.check_layer, probe.plan.candidates))

    def select(self, probe: Probe, budget: int) -> torch.Tensor:
        candidates = probe.plan.candidates
        ratio = probe.plan.policy.ratio or 1.0
        for layer, step_ratio in self.schedule:
            keep = min(len(candidates), max(budget, round(budget * step_ratio / ratio)))
            candidates = top(candidates, self.measure(probe.deviation(layer, candidates)), keep)
        return top(candidates, self.measure(probe.deviation(self.check_layer, candidates)), budget)


@dataclass(frozen=True, slots=True)
class ValueDeviation(KeyDeviation):
    """The same for V."""

    def measure(self, deviation: Deviation) -> torch.Tensor:
        return deviation.value
