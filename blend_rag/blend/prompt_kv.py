"""K and V of a prompt while it is being blended: where cached, hot and fresh values meet.

Knows a plan and a decoder. Stored chunk KV is only read; what is written is this prompt's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from types import ModuleType

import torch

from blend_rag.blend.attention import CausalRows, gpu_kernels, position_attention
from blend_rag.blend.decoder import AttentionShape, Decoder, rotate
from blend_rag.blend.plan import BlendPlan, CachedSpan, HotKV

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
        self._gpu = _GpuLoader.of(plan, decoder)
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []  # of every span, where they are placed one by one
        if plan.spans and self._gpu is None:
            sizes = [span.end - span.start for span in plan.spans]
            cos, sin = _angles(decoder, plan.spans)
            self._angles = list(zip(torch.split(cos, sizes), torch.split(sin, sizes), strict=True))

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
            first = index - index % self._gpu.together
            count = min(self._gpu.together, len(self._layers) - first)
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


def _angles(decoder: Decoder, spans: Sequence[CachedSpan]) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of all spans' tokens one after the other: cos and sin, each [tokens, head_dim]."""
    runs = [torch.arange(span.rotate_from, span.rotate_from + span.end - span.start) for span in spans]
    return decoder.rotary(torch.cat(runs))


class _GpuLoader:
    """Brings stored KV of some layers after the others to where a GPU's passes read it.

    KV that lies on the GPU is read from where it is. KV on the host is copied ahead of the layers the model works on.
    Turning and placing is one launch for several layers of all chunks.
    """

    def __init__(self, plan: BlendPlan, decoder: Decoder, kernels: ModuleType) -> None:
        resident = [span for span in plan.spans if span.kv.data.is_cuda]
        waiting = [span for span in plan.spans if not span.kv.data.is_cuda]
        self.together = 4 if waiting else 8  # layers: few launches, and little to wait for before the first
        here = [_by_token(span.kv.data[:, :, span.skip :], decoder.shape) for span in resident]
        self._resident = _Placing(decoder, resident, kernels, here) if resident else None
        self._staged = _Staging(decoder, waiting, kernels, self.together) if waiting else None

    @classmethod
    def of(cls, plan: BlendPlan, decoder: Decoder) -> _GpuLoader | None:
        """A loader where there are a GPU, Triton, and numbers that lie as the kernel reads them."""
        kernels = gpu_kernels() if decoder.device.type == "cuda" else None
        dtypes = {span.kv.data.dtype for span in plan.spans}
        if kernels is None or len(dtypes) != 1 or decoder.shape.head_dim % 16:
            return None
        return cls(plan, decoder, kernels)

    def load(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put stored KV of the layers from `first` on into `keys` and `values` [layers, kv_heads, tokens, head_dim]."""
        if self._resident:
            self._resident.place(first, keys, values)
        if self._staged:
            self._staged.place(first, keys, values)


class _Placing:
    """Where the tokens of some spans go, and how they are turned; `sources` is where their KV lies on the GPU.

    A source is [layers, 2, tokens, kv_heads, head_dim], a token's numbers one after the other.
    """

    def __init__(
        self, decoder: Decoder, spans: Sequence[CachedSpan], kernels: ModuleType, sources: Sequence[torch.Tensor]
    ) -> None:
        self._kernels = kernels
        self._sources = sources
        sizes = torch.tensor([span.end - span.start for span in spans])
        rows = [
            (source.data_ptr(), source.stride(2) * source.itemsize, source.stride(0), source.stride(1), span.start)
            for span, source in zip(spans, sources, strict=True)
        ]
        addresses, steps, layers, sides, starts = torch.tensor(rows).repeat_interleave(sizes, dim=0).unbind(1)
        ends = sizes.cumsum(0)
        inside = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
        table = torch.stack([addresses + steps * inside, layers, sides, starts + inside])
        self._table = table.to(decoder.device, non_blocking=True)  # [4, tokens], see `place_stored`
        cos, sin = _angles(decoder, spans)
        self._angles = cos.contiguous(), sin.contiguous()

    def place(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the sources' layers from `first` on into `keys` and `values`."""
        self._kernels.place_stored(self._table, self._sources[0].dtype, first, *self._angles, keys, values)


class _Staging:
    """Copies host KV of the next layers to the GPU while the model works on these; two halves of a buffer in turn."""

    def __init__(self, decoder: Decoder, spans: Sequence[CachedSpan], kernels: ModuleType, together: int) -> None:
        self._device = decoder.device
        self._together = together
        self._layers = decoder.shape.layers
        self._parts = [span.kv.data[:, :, span.skip :] for span in spans]
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._buffer = self._allocate(decoder.shape)
        self._placing = _Placing(decoder, spans, kernels, self._buffer)
        self._held: list[int | None] = [None, None]  # first layer of what is in a half or on its way there
        self._arrived = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._begin(0)
        self._begin(together)

    def _allocate(self, shape: AttentionShape) -> list[torch.Tensor]:
        """Room for twice so many layers of every span, each [layers, 2, tokens, kv_heads, head_dim]."""
        sizes = [(2 * self._together, 2, part.shape[2], shape.kv_heads, shape.head_dim) for part in self._parts]
        numbers = [math.prod(size) for size in sizes]
        whole = torch.empty(sum(numbers), dtype=self._parts[0].dtype, device=self._device)
        whole.record_stream(self._copies)  # so that nobody gets this memory while copies into it are under way
        return [piece.view(size) for piece, size in zip(torch.split(whole, numbers), sizes, strict=True)]

    def place(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the layers from `first` on into `keys` and `values`, and have those after the next copied."""
        half = self._half(first)
        if self._held[half] != first:
            self._begin(first)
        here = torch.cuda.current_stream(self._device)
        here.wait_event(self._arrived[half])
        self._placing.place(half * self._together, keys, values)
        self._copies.wait_event(here.record_event())  # a half is filled again when what was in it is in its place
        self._begin(first + 2 * self._together)

    def _half(self, first: int) -> int:
        return first // self._together % 2

    def _begin(self, first: int) -> None:
        count = min(self._together, self._layers - first)
        if count <= 0:
            return
        half = self._half(first)
        start = half * self._together
        with torch.cuda.stream(self._copies):
            for room, part in zip(self._buffer, self._parts, strict=True):
                target, source = room[start : start + count], part[first : first + count]
                if source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                    continue
                for layer, side in product(range(count), range(2)):  # contiguous there and here: plain copies
                    target[layer, side].copy_(source[layer, side], non_blocking=True)
            self._arrived[half].record(self._copies)
        self._held[half] = first


def _by_token(data: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """KV whose tokens' numbers lie one after the other: itself, or a copy."""
    return data if data.stride()[3:] == (shape.head_dim, 1) else data.contiguous()
