"""Chunk KV in this process's memory: bounded bytes, least recently used goes first, pinned stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores.base import MissReason, StoreStats

_TOMBSTONES = 10_000
"""Evicted keys remembered, so that a miss can say so."""


class MemoryStore:
    """A `KVStore` in memory.

    Args:
        max_bytes: bound on the KV held.

    Raises:
        StoreError: the bound is not positive.
    """

    def __init__(self, max_bytes: int = 4 << 30) -> None:
        if max_bytes <= 0:
            msg = f"max_bytes={max_bytes} leaves no room: give the store a positive size"
            raise StoreError(msg)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, ChunkKV] = OrderedDict()  # oldest use first
        self._by_text: dict[tuple[str, str], set[ChunkKey]] = {}  # (namespace, chunk hash): what a miss may mention
        self._pinned: set[ChunkKey] = set()
        self._evicted: OrderedDict[ChunkKey, None] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: ChunkKey) -> ChunkKV | None:
        with self._lock:
            kv = self._chunks.get(key)
            if kv is None:
                self._misses += 1
                return None
            self._hits += 1
            self._chunks.move_to_end(key)
            return kv

    def put(self, key: ChunkKey, kv: ChunkKV) -> None:
        with self._lock:
            pinned = sum(self._chunks[pin].nbytes for pin in self._pinned if pin in self._chunks and pin != key)
            if kv.nbytes + pinned > self._max_bytes:
                msg = (
                    f"chunk KV of {kv.nbytes:,} bytes does not fit a store of {self._max_bytes:,} bytes "
                    f"({pinned:,} pinned): raise max_bytes, unpin, or use smaller chunks"
                )
                raise StoreError(msg)
            self._forget(key)
            self._chunks[key] = kv
            self._by_text.setdefault((key.namespace, key.chunk_hash), set()).add(key)
            self._bytes += kv.nbytes
            self._evicted.pop(key, None)
            self._make_room(key)

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._chunks

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            self._pinned.discard(key)
            return self._forget(key)

    def why_missing(self, key: ChunkKey) -> MissReason:
        with self._lock:
            if key in self._evicted:
                return MissReason.EVICTED
            related = self._by_text.get((key.namespace, key.chunk_hash), set())
            same_model = {other for other in related if other.fingerprint == key.fingerprint}
            if any(other.dtype == key.dtype for other in same_model):
                return MissReason.OTHER_PREFIX
            if same_model:
                return MissReason.OTHER_DTYPE
            return MissReason.OTHER_MODEL if related else MissReason.NEVER_WARMED

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            self._pinned.difference_update(keys)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                len(self._chunks), self._bytes, self._max_bytes, self._hits, self._misses, self._evictions
            )

    def close(self) -> None:
        with self._lock:
            self._chunks.clear()
            self._by_text.clear()
            self._pinned.clear()
            self._evicted.clear()
            self._bytes = 0

    def _make_room(self, newest: ChunkKey) -> None:
        while self._bytes > self._max_bytes:  # there is one to go: `put` has checked that pins and newest fit
            key = next(key for key in self._chunks if key not in self._pinned and key != newest)
            self._forget(key)
            self._evictions += 1
            self._evicted[key] = None
            if len(self._evicted) > _TOMBSTONES:
                self._evicted.popitem(last=False)

    def _forget(self, key: ChunkKey) -> bool:
        kv = self._chunks.pop(key, None)
        if kv is None:
            return False
        self._bytes -= kv.nbytes
        related = self._by_text[key.namespace, key.chunk_hash]
        related.discard(key)
        if not related:
            del self._by_text[key.namespace, key.chunk_hash]
        return True
