"""Chunk KV in this process's memory: bounded bytes, least recently used goes first, pinned stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores.base import MissReason, StoreStats, VerifyReport, explain
from blend_rag.stores.counters import Counters

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
        self._lock = threading.RLock()
        self._chunks: OrderedDict[ChunkKey, ChunkKV] = OrderedDict()  # oldest use first
        self._by_text: dict[tuple[str, str], set[ChunkKey]] = {}  # (namespace, chunk hash): what a miss may mention
        self._documents: dict[tuple[str, str], set[ChunkKey]] = {}  # (namespace, document)
        self._documents_of: dict[ChunkKey, set[str]] = {}
        self._pinned: set[ChunkKey] = set()
        self._evicted: OrderedDict[ChunkKey, None] = OrderedDict()
        self._bytes = 0
        self._counters = Counters()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        with self._lock:
            kv = self._chunks.get(key)
            self._counters.add(key.namespace, "misses" if kv is None else "hits")
            if kv is not None:
                self._chunks.move_to_end(key)
            return kv

    def put(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        with self._lock:
            pinned = sum(self._chunks[pin].nbytes for pin in self._pinned if pin in self._chunks and pin != key)
            if kv.nbytes + pinned > self._max_bytes:
                msg = (
                    f"chunk KV of {kv.nbytes:,} bytes does not fit a store of {self._max_bytes:,} bytes "
                    f"({pinned:,} pinned): raise max_bytes, unpin, or use smaller chunks"
                )
                raise StoreError(msg)
            documents = {*documents, *self._documents_of.get(key, ())}
            self._forget(key)
            self._chunks[key] = kv
            self._by_text.setdefault((key.namespace, key.chunk_hash), set()).add(key)
            self._bytes += kv.nbytes
            self._evicted.pop(key, None)
            self.link(key, documents)
            self._make_room(key)

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._chunks

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        with self._lock:
            if key not in self._chunks:
                return
            for document in documents:
                self._documents.setdefault((key.namespace, document), set()).add(key)
                self._documents_of.setdefault(key, set()).add(document)

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            self._pinned.discard(key)
            return self._forget(key)

    def keys_of(self, document: str, namespace: str = "") -> tuple[ChunkKey, ...]:
        with self._lock:
            keys = self._documents.get((namespace, document), set())
            return tuple(key for key in keys if self._documents_of[key] == {document})

    def knows_document(self, document: str, namespace: str = "") -> bool:
        with self._lock:
            return (namespace, document) in self._documents

    def delete_document(self, document: str, namespace: str = "") -> int:
        with self._lock:
            unused = self.keys_of(document, namespace)
            for key in unused:
                self.delete(key)
            for key in self._documents.pop((namespace, document), set()):
                self._documents_of[key].discard(document)
            return len(unused)

    def purge(self, namespace: str | None = None) -> int:
        with self._lock:
            keys = [key for key in self._chunks if namespace in (None, key.namespace)]
            for key in keys:
                self.delete(key)
            return len(keys)

    def verify(self, namespace: str | None = None) -> VerifyReport:
        """Memory is taken as right: only counts."""
        return VerifyReport(self.stats(namespace).chunks or 0)

    def why_missing(self, key: ChunkKey) -> MissReason:
        with self._lock:
            if key in self._evicted:
                return MissReason.EVICTED
            related = self._by_text.get((key.namespace, key.chunk_hash), set())
            return explain(key, ((other.fingerprint, other.dtype) for other in related))

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            self._pinned.difference_update(keys)

    def stats(self, namespace: str | None = None) -> StoreStats:
        with self._lock:
            held = [kv.nbytes for key, kv in self._chunks.items() if namespace in (None, key.namespace)]
            return StoreStats("memory", len(held), sum(held), self._max_bytes, **self._counters.of(namespace))

    def close(self) -> None:
        with self._lock:
            self.purge()
            self._pinned.clear()
            self._evicted.clear()

    def _make_room(self, newest: ChunkKey) -> None:
        while self._bytes > self._max_bytes:  # there is one to go: `put` has checked that pins and newest fit
            key = next(key for key in self._chunks if key not in self._pinned and key != newest)
            self._forget(key)
            self._counters.add(key.namespace, "evictions")
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
        for document in self._documents_of.pop(key, ()):
            keys = self._documents[key.namespace, document]
            keys.discard(key)
            if not keys:
                del self._documents[key.namespace, document]
        return True
