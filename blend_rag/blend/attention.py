"""Causal attention of packed queries, masked by position.

Selected tokens are packed, so a mask by row (which is what a kernel's own causal flag gives) would let a token see keys
behind its own position. Here a query sees exactly the keys at positions up to its own. Blocks of keys that no query
of a block may see are never touched, and no mask is larger than one block of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch.nn.functional import scaled_dot_product_attention

_CPU_BLOCK = 64  # rows; small blocks skip more keys, measured best at 1k to 8k keys on AVX2
_CUDA_BLOCK = 512


@cache
def gpu_kernels() -> ModuleType | None:
    """Triton kernels, or None where there is no Triton: plain torch does the same, slower."""
    try:
        return import_module("blend_rag.blend.kernels")
    except ImportError:
        return None


def fitting_kernels(head_dim: int) -> ModuleType | None:
    """The kernels if they can do heads of this size: powers of two from 16 on."""
    return gpu_kernels() if head_dim >= 16 and head_dim & (head_dim - 1) == 0 else None


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Query rows [start, stop) and the number of leading keys any of them may see."""

    start: int
    stop: int
    keys: int


@dataclass(frozen=True, slots=True)
class CausalRows:
    """Which keys each row of a pass may see; made once, used by every layer.

    Attributes:
        positions: of the query rows, [rows], rising.
        key_positions: of the keys, [keys], rising.
        blocks: rows in groups that share a bound.
        triangular: rows and keys are the same tokens, so a kernel's own causal flag is exact.
        limits: how many leading keys each row sees, [rows], int32.
    """

    positions: torch.Tensor
    key_positions: torch.Tensor
    blocks: tuple[RowBlock, ...]
    triangular: bool
    limits: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, key_positions: torch.Tensor, device: torch.device) -> CausalRows:
        """Group rows by what they may see. Both position lists must rise; pass them on the CPU."""
        size = _CPU_BLOCK if device.type == "cpu" else _CUDA_BLOCK
        rows = len(positions)
        lasts = positions[torch.arange(size - 1, rows + size - 1, size).clamp_(max=rows - 1)] if rows else positions
        if rows and int(key_positions[0]) == 0 and int(key_positions[-1]) == len(key_positions) - 1:
            bounds, limits = (lasts + 1).clamp_(max=len(key_positions)).tolist(), positions + 1  # keys are 0, 1, 2, ...
            limits = limits.clamp_(max=len(key_positions)).int()
        else:
            bounds = torch.searchsorted(key_positions, lasts, right=True).tolist()
            limits = torch.searchsorted(key_positions, positions, right=True, out_int32=True)
        starts = range(0, rows, size)
        blocks = tuple(
            RowBlock(start, min(start + size, rows), bound) for start, bound in zip(starts, bounds, strict=True)
        )
        triangular = rows == len(key_positions) and torch.equal(positions, key_positions)
        return cls(positions.to(device), key_positions.to(device), blocks, triangular, limits.to(device))

    def masks(self) -> Iterator[tuple[RowBlock, torch.Tensor]]:
        """Each block with its boolean mask [rows, keys], True where a row may look."""
        for block in self.blocks:
            rows = self.positions[block.start : block.stop, None]
            yield block, self.key_positions[None, : block.keys] <= rows


def position_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: CausalRows, scale: float
) -> torch.Tensor:
    """Softmax attention of each row over the keys at positions up to its own.

    Args:
        query: rotated, [rows, heads, head_dim].
        keys, values: [kv_heads, keys, head_dim], K rotated; heads are grouped over kv_heads.
        rows: who sees what.
        scale: multiplies query-key products.

    Returns:
        [rows, heads, head_dim].
    """
    if query.is_cuda and len(query) and (kernels := fitting_kernels(query.shape[-1])):
        out: torch.Tensor = kernels.limited_attention(query, keys, values, rows.limits, scale)
        return out
    query = query.transpose(0, 1)[None]  # [1, heads, rows, head_dim]
    keys, values = keys[None], values[None]
    if query.device.type != "cpu":  # masked attention with grouped heads has no fused CUDA kernel
        groups = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    grouped = query.shape[1] != keys.shape[1]
    if rows.triangular:
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)
    out = torch.empty_like(query)
    for block, mask in rows.masks():
        out[:, :, block.start : block.stop] = scaled_dot_product_attention(
            query[:, :, block.start : block.stop],
            keys[:, :, : block.keys],
            values[:, :, : block.keys],
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
    return out[0].transpose(0, 1)


class MassMeter:
    """Sums the attention some rows of a pass give to each key, over layers and heads.

    Args:
        positions: of the pass's rows, [rows], rising, on the CPU.
        key_positions: of the keys, [keys], rising, on the CPU.
        asking: rows that count, [n], on the CPU.
        scale: multiplies query-key products.
        device: where the pass runs.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        key_positions: torch.Tensor,
        asking: torch.Tensor,
        scale: float,
        device: torch.device,
    ) -> None:
        self._rows = CausalRows.of(positions, key_positions, device)
        self._asking = asking.to(device)
        self._scale = scale
        self._mass: torch.Tensor | None = None  # [kv_heads, or 1 where heads are summed at once; keys], float32

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, count: bool) -> torch.Tensor:
        """Attention of a layer as `position_attention` gives it; `count` adds it to the sum."""
        kernels = fitting_kernels(query.shape[-1]) if query.is_cuda else None
        if not count or kernels is None:
            out = position_attention(query, keys, values, self._rows, self._scale)
            if count:
                askers = self._rows.positions[self._asking]
                found = attention_mass(query[self._asking], keys, askers, self._rows.key_positions, self._scale)
                self._mass = found[None] if self._mass is None else self._mass.add_(found)
            return out
        if self._mass is None:
            self._mass = torch.zeros(keys.shape[:2], dtype=torch.float32, device=query.device)
        logs = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        result: torch.Tensor = kernels.limited_attention(query, keys, values, self._rows.limits, self._scale, logs)
        kernels.add_mass(query, keys, self._rows.limits, logs, self._asking, self._scale, self._mass)
        return result

    def mass(self) -> torch.Tensor:
        """What each key has received, [keys], float32."""
        assert self._mass is not None, "no layer was counted"
        return self._mass.sum(0)


def attention_mass(
    query: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention each key receives, summed over rows and heads, in float32: [keys].

    For a few rows only (a question's tokens): the probabilities are written out.

    Args:
        query: rotated, [rows, heads, head_dim].
        keys: rotated, [kv_heads, keys, head_dim]; heads are grouped over kv_heads.
        positions: of the rows, [rows].
        key_positions: of the keys, [keys].
        scale: multiplies query-key products.
    """
    count, heads, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    grouped = query.float().transpose(0, 1).reshape(kv_heads, heads // kv_heads * count, head_dim)
    scores = torch.bmm(grouped, keys.float().transpose(1, 2)).view(heads, count, total) * scale
    hidden = key_positions[None, :] > positions[:, None]
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum((0, 1))
