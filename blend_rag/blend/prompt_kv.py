"""K and V of a prompt while it is being blended: where cached, hot and fresh values meet.

Knows a plan and a decoder. Stored chunk KV is only read; what is written is this prompt's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blend_rag.blend.attention import CausalRows, fitting_kernels, position_attention
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
        self._gpu = _GpuLoader(plan, decoder, self._angles) if plan.spans and decoder.device.type == "cuda" else None

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, loaded on first use."""
        found = self._layers[index]
        if found is None:
            found = self._layers[index] = self._load(index)
        return found

    def write(self, index: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put fresh K and V [rows, kv_heads, head_dim] over the positions `rows` of one layer."""
        keys, values = self.layer(index)
        keys.index_copy_(1, rows, key.transpose(0, 1))
        values.index_copy_(1, rows, value.transpose(0, 1))

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
        if self._gpu:
            self._gpu.load(index, keys, values)
            return keys, values
        for span, (cos, sin) in zip(plan.spans, self._angles, strict=True):
            stored = span.kv.data[index, :, span.skip :].to(decoder.device, non_blocking=True)
            key, value = stored.transpose(1, 2)  # each [kv_heads, tokens, head_dim]
            rotate(key, cos, sin, out=keys[:, span.start : span.end])
            values[:, span.start : span.end] = value
        return keys, values


class _GpuLoader:
    """Brings stored KV of one layer after another to a GPU, the next one while the model works on this one.

    All spans of a layer are put together first, so that turning and placing them is one launch.
    """

    def __init__(self, plan: BlendPlan, decoder: Decoder, angles: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._spans = plan.spans
        self._device = decoder.device
        self._cos = torch.cat([cos for cos, _ in angles]).contiguous()
        self._sin = torch.cat([sin for _, sin in angles]).contiguous()
        positions = torch.cat([torch.arange(span.start, span.end) for span in plan.spans])
        self._positions = positions.to(decoder.device, non_blocking=True)
        self._kernels = fitting_kernels(decoder.shape.head_dim)
        self._layers = decoder.shape.layers
        on_host = any(span.kv.data.device.type == "cpu" for span in plan.spans)
        self._copies = torch.cuda.Stream(decoder.device) if on_host else None  # type: ignore[no-untyped-call]
        if self._copies:
            self._copies.wait_stream(torch.cuda.current_stream(decoder.device))  # what it reads may just be written
        self._ahead: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def load(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one layer's stored KV into `keys` and `values` [kv_heads, tokens, head_dim]."""
        stored = self._gather(index)  # [2, stored tokens, kv_heads, head_dim]
        if self._kernels:
            self._kernels.place_stored(stored, self._cos, self._sin, self._positions, keys, values)
            return
        key, value = stored.transpose(1, 2)
        rotated = torch.empty(key.shape, dtype=keys.dtype, device=keys.device)
        rotate(key, self._cos, self._sin, out=rotated)
        keys[:, self._positions] = rotated
        values[:, self._positions] = value.to(values.dtype)

    def _gather(self, index: int) -> torch.Tensor:
        if self._copies is None:
            return self._together(index)
        if index not in self._ahead:
            self._begin(index)
        stored, arrived = self._ahead.pop(index)
        here = torch.cuda.current_stream(self._device)
        here.wait_event(arrived)
        stored.record_stream(here)
        if index + 1 < self._layers:
            self._begin(index + 1)
        return stored

    def _begin(self, index: int) -> None:
        assert self._copies is not None
        with torch.cuda.stream(self._copies):
            stored = self._together(index)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._copies)
        self._ahead[index] = (stored, arrived)

    def _together(self, index: int) -> torch.Tensor:
        parts = [span.kv.data[index, :, span.skip :] for span in self._spans]
        if self._copies is None:
            return torch.cat(parts, dim=1)
        first = parts[0]
        stored = torch.empty(2, len(self._positions), *first.shape[2:], dtype=first.dtype, device=self._device)
        at = 0
        for part in parts:
            stored[:, at : at + part.shape[1]].copy_(part, non_blocking=True)
            at += part.shape[1]
        return stored
