"""A selector gives every candidate a score; the highest are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from blend_rag.blend.probe import Probe


class Selector(ABC):
    """Base of all rules. Subclasses override `score`."""

    @abstractmethod
    def score(self, probe: Probe) -> torch.Tensor:
        """One float32 score per candidate, [candidates]; higher means sooner recomputed."""

    def select(self, probe: Probe, budget: int) -> torch.Tensor:
        """The `budget` candidates with the highest scores, as rising positions; ties go to the earlier token."""
        return top(probe.plan.candidates, self.score(probe), budget)


def top(positions: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` positions with the highest scores, rising. A stable sort makes ties the same on every run."""
    order = scores.sort(descending=True, stable=True).indices[:count]
    return positions[order].sort().values
