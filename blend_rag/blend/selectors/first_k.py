"""First tokens of each chunk: they soak up attention as if the prompt began there. Needs no score pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.probe import Probe
from blend_rag.blend.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class FirstK(Selector):
    """The same number of leading tokens of every chunk, as far as the budget divides (EPIC, arXiv 2410.15332)."""

    def score(self, probe: Probe) -> torch.Tensor:
        return -probe.plan.chunk_offsets.float()
