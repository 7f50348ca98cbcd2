"""What a KV store offers. Stores know keys and chunk KV, never a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from blend_rag.kv import ChunkKey, ChunkKV


class MissReason(str, Enum):
    """Why KV asked for was not there."""

    NEVER_WARMED = "never warmed"
    EVICTED = "evicted"
    OTHER_PREFIX = "other prefix"
    OTHER_MODEL = "other model"
    OTHER_DTYPE = "other dtype"
    REUSE_OFF = "reuse is off"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size and use of a store; bytes count chunk KV alone."""

    chunks: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int
    evictions: int


class KVStore(Protocol):
    """Chunk KV by content key. Safe to use from several threads; every failure to find is an answer, not an error."""

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """KV under `key`, or None. Callers only read it."""
        ...

    def put(self, key: ChunkKey, kv: ChunkKV) -> None:
        """Keep `kv` under `key`.

        Raises:
            StoreError: it can never fit.
        """
        ...

    def __contains__(self, key: ChunkKey) -> bool: ...

    def delete(self, key: ChunkKey) -> bool:
        """Forget `key`; whether it was there."""
        ...

    def why_missing(self, key: ChunkKey) -> MissReason:
        """Best explanation for a key that `get` did not find, from the same namespace alone."""
        ...

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Never evict these keys until `unpin`."""
        ...

    def unpin(self, keys: Iterable[ChunkKey]) -> None: ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...
