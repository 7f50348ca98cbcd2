"""What blending needs from a model: its own forward with attention swapped.

Knows tensors only. Rows are tokens in any number from any positions of any prompts; norms, biases, MLPs, quantised
weights and tensor parallelism stay the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model's attention; `scale` multiplies query-key products."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one attention layer receives for the rows of a pass.

    Attributes:
        layer: index from 0.
        query: rotated, [rows, heads, head_dim].
        key: rotated, [rows, kv_heads, head_dim].
        value: [rows, kv_heads, head_dim].
        key_unrotated: K before RoPE and after QK-norm, [rows, kv_heads, head_dim]; may be left out of a forward that
            was not asked for it.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_unrotated: torch.Tensor | None = None

    def unrotated(self) -> torch.Tensor:
        """`key_unrotated` of a forward that was asked for it."""
        assert self.key_unrotated is not None, "this forward was not asked for K before RoPE"
        return self.key_unrotated


Attend = Callable[[LayerInputs], torch.Tensor]
"""Attention of one layer: inputs of all rows to outputs [rows, heads, head_dim]."""


class Decoder(Protocol):
    """A decoder-only model whose attention the caller supplies."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        stop_after: int | None = None,
        unrotated: bool = False,
    ) -> torch.Tensor | None:
        """Run `token_ids` [rows] at `positions` [rows] through the model; `unrotated` asks for K before RoPE too.

        Returns the normed last hidden states [rows, hidden]; with `stop_after`, None as soon as `attend` has been
        called for that layer (its result is not used, nothing behind it runs).
        """
        ...

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own RoPE at `positions` [n]: cos and sin, each [n, head_dim] in float32, scaling included."""
        ...

    def sum_over_ranks(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores summed over the ranks that each hold some of the heads; the same tensor where one rank holds all."""
        ...

    def from_first_rank(self, positions: torch.Tensor) -> torch.Tensor:
        """What the first rank chose, [n], int64, on the CPU, so that all ranks compute the same tokens."""
        ...


def rotate(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Write RoPE(key) into `out`, computed in float32.

    Args:
        key: un-rotated, [..., n, head_dim].
        cos, sin: [n, head_dim], float32, both halves of the last axis alike.
        out: same shape as `key`, any dtype.
    """
    half = key.shape[-1] // 2
    first, second = key[..., :half].float(), key[..., half:].float()
    cos, sin = cos[:, :half], sin[:, :half]
    out[..., :half].copy_(first * cos - second * sin)
    out[..., half:].copy_(second * cos + first * sin)


def unrotate(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """K before RoPE from rotated K, where the model offers no better place to take it.

    Divides by cos² + sin², because YaRN's tables carry a scale. Args as in `rotate`; float32 result.
    """
    half = key.shape[-1] // 2
    first, second = key[..., :half].float(), key[..., half:].float()
    cos, sin = cos[:, :half], sin[:, :half]
    norm = cos.square() + sin.square()
    return torch.cat([(first * cos + second * sin) / norm, (second * cos - first * sin) / norm], dim=-1)
