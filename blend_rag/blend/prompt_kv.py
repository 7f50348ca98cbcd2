"""K and V of a prompt while it is being blended: where cached, hot and fresh values meet.

Knows a plan and a decoder. Stored chunk KV is only read; what is written is this prompt's own.
"""

from __future__ import annotations

import torch

from blend_rag.blend.attention import CausalRows, position_attention
from blend_rag.blend.decoder import Decoder, rotate
from blend_rag.blend.plan import BlendPlan, HotKV

Fresh = tuple[torch.Tensor, torch.Tensor]
"""K (rotated) and V of the rows of a pass, each [rows, kv_heads, head_dim]."""


class PromptKV:
    """Rotated K and V of all tokens of one prompt, per layer [kv_heads, tokens, head_dim].

    Layers are allocated and filled with what is known (hot, stored) on first use, one at a time, so that a score pass
    that stops early loads only the layers it needs.
    """

    def __init__(self, plan: BlendPlan, decoder: Decoder) -> None:
        self.plan = plan
        self._decoder = decoder
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * decoder.shape.layers
        self._angles = [
            decoder.rotary(torch.arange(span.rotate_from, span.rotate_from + span.end - span.start))
            for span in plan.spans
        ]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, loaded on first use."""
        found = self._layers[index]
        if found is None:
            found = self._layers[index] = self._load(index)
        return found

    def write(self, index: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put fresh K and V [rows, kv_heads, head_dim] over the positions `rows` of one layer."""
        keys, values = self.layer(index)
        keys[:, rows] = key.transpose(0, 1)
        values[:, rows] = value.transpose(0, 1)

    def attend(self, index: int, rows: CausalRows, query: torch.Tensor, fresh: Fresh) -> torch.Tensor:
        """Write fresh K and V of `rows` and let their queries look at the whole prompt: [rows, heads, head_dim]."""
        self.write(index, rows.positions, *fresh)
        keys, values = self.layer(index)
        return position_attention(query, keys, values, rows, self._decoder.shape.scale)

    def take_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand one layer over, as [1, kv_heads, tokens, head_dim], and forget it."""
        keys, values = self.layer(index)
        self._layers[index] = None
        return keys[None], values[None]

    def leading(self, length: int) -> HotKV:
        """A copy of the first `length` tokens."""
        layers = [self.layer(index) for index in range(len(self._layers))]
        return HotKV(
            length,
            tuple(keys[:, :length].clone() for keys, _ in layers),
            tuple(values[:, :length].clone() for _, values in layers),
        )

    def _load(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        decoder, plan = self._decoder, self.plan
        size = (decoder.shape.kv_heads, len(plan), decoder.shape.head_dim)
        keys = torch.empty(size, dtype=decoder.dtype, device=decoder.device)
        values = torch.empty_like(keys)
        if plan.hot:
            keys[:, : plan.hot.length] = plan.hot.keys[index][:, : plan.hot.length]
            values[:, : plan.hot.length] = plan.hot.values[index][:, : plan.hot.length]
        for span, (cos, sin) in zip(plan.spans, self._angles, strict=True):
            stored = span.kv.data[index, :, span.skip :].to(decoder.device, non_blocking=True)
            key, value = stored.transpose(1, 2)  # each [kv_heads, tokens, head_dim]
            rotate(key, cos, sin, out=keys[:, span.start : span.end])
            values[:, span.start : span.end] = value
        return keys, values
