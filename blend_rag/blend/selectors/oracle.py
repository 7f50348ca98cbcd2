"""What one would choose knowing full prefill: an upper bound for research, never cheaper than it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.probe import Deviation, Probe
from blend_rag.blend.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Oracle(Selector):
    """Largest true change of V and K, weighted by how much the question really looks there, over all layers."""

    def score(self, probe: Probe) -> torch.Tensor:
        return probe.truth(_seen_error)


def _seen_error(deviation: Deviation, mass: torch.Tensor) -> torch.Tensor:
    relative = deviation.value / deviation.value.mean() + deviation.key / deviation.key.mean()
    return mass * relative.nan_to_num()
