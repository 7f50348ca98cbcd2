"""Random tokens: the baseline every rule has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.probe import Probe
from blend_rag.blend.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Random(Selector):
    """Uniformly chosen tokens, the same for the same seed."""

    seed: int = 0

    def score(self, probe: Probe) -> torch.Tensor:
        return torch.rand(len(probe.plan.candidates), generator=torch.Generator().manual_seed(self.seed))
