"""Choosing tokens with a seed of one's own.

transformers samples from the process-wide random state, which threads share. Here its own warpers shape the scores,
and noise from a private generator turns the greedy choice into a sample (the Gumbel-max trick).
"""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blend_rag.engines.base import SamplingParams


def make_sampler(sampling: SamplingParams, rows: int) -> LogitsProcessorList:
    """Processors after which the highest score is the token to take; nothing for greedy."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    found.append(GumbelNoise(sampling.seed, rows))
    return found


class GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, so that the argmax is a draw from the softmax; every row of a batch has its own generator."""

    def __init__(self, seed: int | None, rows: int) -> None:
        self._generators = [torch.Generator() for _ in range(rows)]
        for row, generator in enumerate(self._generators):
            generator.seed() if seed is None else generator.manual_seed(seed + row)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        width = scores.shape[-1]
        uniform = torch.stack([torch.rand(width, generator=generator) for generator in self._generators])
        noise = -(-(uniform.clamp_min(1e-20)).log()).clamp_min(1e-20).log()
        return scores + noise.to(scores.device)  # type: ignore[return-value]
