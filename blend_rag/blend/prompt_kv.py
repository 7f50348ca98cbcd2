"""K and V of a prompt while it is being blended: where cached, hot and fresh values meet.

Knows a plan and a decoder. Stored chunk KV is only read; what is written is this prompt's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from blend_rag.blend.attention import CausalRows, fitting_kernels, position_attention
from blend_rag.blend.decoder import Decoder, rotate
from blend_rag.blend.plan import BlendPlan, HotKV

_TOGETHER = 4  # layers that come to a GPU at once: fewer launches, and little to wait for before the first

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
        """Known K and V of one layer; on a GPU its neighbours come along."""
        first, count = index, 1
        if self._gpu:
            first = index - index % _TOGETHER
            count = min(_TOGETHER, len(self._layers) - first)
        decoder, plan = self._decoder, self.plan
        size = (count, decoder.shape.kv_heads, len(plan), decoder.shape.head_dim)
        keys = torch.empty(size, dtype=decoder.dtype, device=decoder.device)
        values = torch.empty_like(keys)
        if plan.hot:
            for layer in range(count):
                keys[layer, :, : plan.hot.length] = plan.hot.keys[first + layer][:, : plan.hot.length]
                values[layer, :, : plan.hot.length] = plan.hot.values[first + layer][:, : plan.hot.length]
        if self._gpu:
            self._gpu.load(first, keys, values)
            self._layers[first : first + count] = zip(keys, values, strict=True)
            return keys[index - first], values[index - first]
        for span, (cos, sin) in zip(plan.spans, self._angles, strict=True):
            stored = span.kv.data[index, :, span.skip :].to(decoder.device)
            key, value = stored.transpose(1, 2)  # each [kv_heads, tokens, head_dim]
            rotate(key, cos, sin, out=keys[0, :, span.start : span.end])
            values[0, :, span.start : span.end] = value
        return keys[0], values[0]


class _GpuLoader:
    """Brings stored KV of some layers after the others to a GPU, the next while the model works on these.

    All spans are put together first, so that turning and placing them is one launch for `_TOGETHER` layers.
    """

    def __init__(self, plan: BlendPlan, decoder: Decoder, angles: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._spans = plan.spans
        self._device = decoder.device
        self._cos = torch.cat([cos for cos, _ in angles]).contiguous()
        self._sin = torch.cat([sin for _, sin in angles]).contiguous()
        positions = torch.cat([torch.arange(span.start, span.end) for span in plan.spans])
        self._positions = positions.to(decoder.device, non_blocking=True)
        self._kernels = fitting_kernels(decoder.shape.head_dim)
        self._count = decoder.shape.layers
        on_host = any(span.kv.data.device.type == "cpu" for span in plan.spans)
        self._copies = torch.cuda.Stream(decoder.device) if on_host else None  # type: ignore[no-untyped-call]
        if self._copies:
            self._copies.wait_stream(torch.cuda.current_stream(decoder.device))  # what it reads may just be written
        self._ahead: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def load(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put stored KV of the layers from `first` on into `keys` and `values` [layers, kv_heads, tokens, head_dim]."""
        stored = self._gather(first, len(keys))  # [layers, 2, stored tokens, kv_heads, head_dim]
        if self._kernels:
            self._kernels.place_stored(stored, self._cos, self._sin, self._positions, keys, values)
            return
        key, value = stored.permute(1, 0, 3, 2, 4)
        rotated = torch.empty(key.shape, dtype=keys.dtype, device=keys.device)
        rotate(key, self._cos, self._sin, out=rotated)
        keys.index_copy_(2, self._positions, rotated)
        values.index_copy_(2, self._positions, value.to(values.dtype))

    def _gather(self, first: int, count: int) -> torch.Tensor:
        if self._copies is None:
            return self._together(first, count)
        if first not in self._ahead:
            self._begin(first)
        stored, arrived = self._ahead.pop(first)
        here = torch.cuda.current_stream(self._device)
        here.wait_event(arrived)
        stored.record_stream(here)
        if first + count < self._count:
            self._begin(first + count)
        return stored

    def _begin(self, first: int) -> None:
        assert self._copies is not None
        with torch.cuda.stream(self._copies):
            stored = self._together(first, min(_TOGETHER, self._count - first))
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._copies)
        self._ahead[first] = (stored, arrived)

    def _together(self, first: int, count: int) -> torch.Tensor:
        parts = [span.kv.data[first : first + count, :, span.skip :] for span in self._spans]
        if self._copies is None:
            return torch.cat(parts, dim=2)
        shape = (count, 2, len(self._positions), *parts[0].shape[3:])
        stored = torch.empty(shape, dtype=parts[0].dtype, device=self._device)
        at = 0
        for part in parts:
            for layer, side in product(range(count), range(2)):  # contiguous there and here: plain copies, no kernel
                stored[layer, side, at : at + part.shape[2]].copy_(part[layer, side], non_blocking=True)
            at += part.shape[2]
        return stored
