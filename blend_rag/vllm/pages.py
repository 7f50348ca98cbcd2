"""vLLM's KV pages: written through the backend's own function, read through a layout learned from it.

Backends order a page's bytes each in their own way and differ between versions. Writing known numbers into the null
block (which holds nobody's KV) and looking where they went shows the order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blend_rag.blend.plan import HotKV
from blend_rag.errors import ConnectorError
from blend_rag.vllm.decoder import VLLMDecoder

_BASE = 128  # digits that every cache dtype holds exactly


class Pages:
    """The pages of all layers.

    Args:
        decoder: names the layers and their shape.
        block_size: tokens of a page.

    Raises:
        ConnectorError: pages hold something else than K and V as they are.
    """

    def __init__(self, decoder: VLLMDecoder, block_size: int) -> None:
        self._layers = [layer for _, layer in decoder.layers]
        self._shape = decoder.shape
        self._device = decoder.device
        self._block_size = block_size
        self._order = self._learn()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V [tokens, kv_heads, head_dim] to where `slots` says."""
        real = self._layers[layer]
        real.impl.do_kv_cache_update(real, key.contiguous(), value.contiguous(), real.kv_cache, slots)

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Where tokens [start, end) of a request lie, as vLLM's slot mapping."""
        blocks = torch.tensor(block_ids).to(self._device, non_blocking=True)
        positions = torch.arange(start, end, device=self._device)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size

    def read(self, block_ids: Sequence[int], length: int) -> HotKV:
        """Rotated K and V of the first `length` tokens of a request."""
        blocks = torch.tensor(list(block_ids[: -(-length // self._block_size)]), device=self._device)
        keys, values = [], []
        for layer in self._layers:
            pages = layer.kv_cache[blocks].reshape(len(blocks), -1)[:, self._order]  # [pages, 2, kv_heads, size, dim]
            both = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            keys.append(both[0])
            values.append(both[1])
        return HotKV(length, tuple(keys), tuple(values))

    def _learn(self) -> torch.Tensor:
        """Index of every number of a page, [2, kv_heads, tokens of a page, head_dim]."""
        layer, shape, size = self._layers[0], self._shape, self._block_size
        null_page = layer.kv_cache[0]
        kept = null_page.clone()
        per_side = size * shape.kv_heads * shape.head_dim
        codes = torch.arange(2 * per_side, device=self._device)
        found = torch.zeros(null_page.numel(), dtype=torch.int64, device=self._device)
        slots = torch.arange(size, device=self._device)
        digit = 1
        while digit < 2 * per_side:
            written = ((codes // digit) % _BASE).to(layer.kv_cache.dtype)
            key, value = written.view(2, size, shape.kv_heads, shape.head_dim)
            layer.impl.do_kv_cache_update(layer, key.contiguous(), value.contiguous(), layer.kv_cache, slots)
            found += layer.kv_cache[0].reshape(-1).round().long() * digit
            digit *= _BASE
        layer.kv_cache[0].copy_(kept)
        if len(found) != 2 * per_side or not torch.equal(found.sort().values, codes):
            raise ConnectorError(
                "pages of this attention backend do not hold K and V as they are: "
                "serve without BlendConnector, or choose another attention backend"
            )
        order = torch.empty_like(codes)
        order[found] = torch.arange(len(found), device=self._device)
        return order.view(2, size, shape.kv_heads, shape.head_dim).transpose(1, 2).contiguous()


def kv_bytes_per_token(decoder: VLLMDecoder) -> int:
    """Bytes of K and V of one token over all layers, in the model's dtype, on this rank."""
    shape = decoder.shape
    return int(2 * shape.layers * shape.kv_heads * shape.head_dim * torch.finfo(decoder.dtype).bits // 8)
