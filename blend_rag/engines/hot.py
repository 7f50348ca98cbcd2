"""Exact KV of prompt beginnings, kept where the model runs. Approximate KV never enters."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from blend_rag.blend.plan import HotKV


class HotPrefixes:
    """A few beginnings by their token ids, least recently used goes first.

    KV of token i depends on tokens 0…i alone, so any common beginning of an entry and a prompt is exact for the prompt.

    Args:
        max_bytes: bound on the KV held; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, ...], HotKV] = OrderedDict()

    def find(self, token_ids: Sequence[int]) -> HotKV | None:
        """The longest known beginning of `token_ids`."""
        with self._lock:
            shared = {entry: _common(entry, token_ids) for entry in self._entries}
            best = max(shared, key=lambda entry: shared[entry], default=None)
            if best is None or shared[best] == 0:
                return None
            self._entries.move_to_end(best)
            found = self._entries[best]
            return HotKV(shared[best], found.keys, found.values)

    def fits(self, kv_bytes: int) -> bool:
        """Whether an entry of that size would be kept."""
        return kv_bytes <= self._max_bytes

    def add(self, token_ids: Sequence[int], kv: HotKV) -> None:
        """Keep exact KV of `token_ids`; entries that are beginnings of it go."""
        ids = tuple(token_ids[: kv.length])
        with self._lock:
            for entry in [entry for entry in self._entries if entry == ids[: len(entry)]]:
                del self._entries[entry]
            self._entries[ids] = kv
            while self._entries and sum(map(_nbytes, self._entries.values())) > self._max_bytes:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _nbytes(kv: HotKV) -> int:
    tensors: tuple[torch.Tensor, ...] = (*kv.keys, *kv.values)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
