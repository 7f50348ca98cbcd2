"""Tokens that the question attends to most over stored KV (ProphetKV, FusionRAG, CacheClip)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.probe import Probe
from blend_rag.blend.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class QueryGuided(Selector):
    """Largest softmax attention mass from the question's tokens, summed over layers and heads.

    `first_layer` and `last_layer` bound the layers that vote; `last_layer` also ends the score pass.
    """

    first_layer: int = 0
    last_layer: int | None = None

    def score(self, probe: Probe) -> torch.Tensor:
        return probe.guidance(self.first_layer, self.last_layer)
