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
    OTHER_SHAPE = "other shape"
    """What is stored does not have this model's layers, heads or tokens."""
    TORN = "torn file"
    """Stored bytes are not those that were put: truncated, flipped, swapped or gone."""
    FORGED = "bad signature"
    """A shared tier holds an object under this key that the deployment's secret did not sign."""
    TOO_SLOW = "store too slow"
    UNREACHABLE = "store unreachable"
    FAILED = "store failed"
    TEXT_DIFFERS = "text differs from warmed"
    """The chunk's document was warmed, this text of it was not: another splitter, prompt format or edition."""
    REUSE_OFF = "reuse is off"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size and use of a store, of one namespace or of all.

    Attributes:
        tier: what kind of store it is, without passwords.
        chunks: chunks held; None where the tier cannot tell.
        bytes: bytes held; None where the tier cannot tell. Memory counts chunk KV, disk counts files.
        max_bytes: bound, or None.
        hits, misses: answers of `get` in this process.
        evictions: chunks this process dropped to make room.
        damaged: objects this process rejected: torn, swapped, forged.
        faults: operations a tier was too slow or not reachable for.
        tiers: the same per tier, of a tiered store.
    """

    tier: str
    chunks: int | None
    bytes: int | None
    max_bytes: int | None
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    faults: int = 0
    tiers: tuple[StoreStats, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Chunks whose stored bytes were read and compared, and digests of those that were rejected."""

    checked: int
    damaged: tuple[str, ...] = ()

    def __add__(self, other: VerifyReport) -> VerifyReport:
        return VerifyReport(self.checked + other.checked, self.damaged + other.damaged)


class KVStore(Protocol):
    """Chunk KV by content key. Safe to use from several threads; every failure to find is an answer, not an error.

    No answer about one namespace depends on another: keys, counts and reasons of one are invisible to the others.
    """

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """KV under `key`, verified, or None. Callers only read it."""
        ...

    def put(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        """Keep `kv` under `key` for the documents it comes from; once this returns, a lasting tier has it.

        Raises:
            StoreError: it cannot be kept.
        """
        ...

    def __contains__(self, key: ChunkKey) -> bool: ...

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        """Note that KV which is there already comes from these documents too.

        Raises:
            StoreError: it cannot be noted.
        """
        ...

    def delete(self, key: ChunkKey) -> bool:
        """Forget `key`; whether it was there.

        Raises:
            StoreError: it may still be there.
        """
        ...

    def keys_of(self, document: str, namespace: str = "") -> tuple[ChunkKey, ...]:
        """Keys of the KV that this document, and no other of the namespace, uses."""
        ...

    def knows_document(self, document: str, namespace: str = "") -> bool:
        """Whether there is KV of this document."""
        ...

    def delete_document(self, document: str, namespace: str = "") -> int:
        """Forget a document and the KV that no other document of the namespace uses; how many chunks.

        Raises:
            StoreError: some may still be there; the document is not forgotten, try again.
        """
        ...

    def purge(self, namespace: str | None = None) -> int:
        """Forget all KV of a namespace, or of all; how many chunks.

        Raises:
            StoreError: the tier cannot list what it holds.
        """
        ...

    def verify(self, namespace: str | None = None) -> VerifyReport:
        """Read all KV of a namespace, or of all, and drop what is damaged.

        Raises:
            StoreError: the tier cannot list what it holds.
        """
        ...

    def why_missing(self, key: ChunkKey) -> MissReason:
        """Best explanation for a key that `get` did not find, from the same namespace alone."""
        ...

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Never evict these keys until `unpin`."""
        ...

    def unpin(self, keys: Iterable[ChunkKey]) -> None: ...

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Numbers of one namespace, or (for operators) of all."""
        ...

    def close(self) -> None: ...


def explain(key: ChunkKey, related: Iterable[tuple[str, str]]) -> MissReason:
    """Why `key` is missing, from fingerprint and dtype of the KV that same namespace and chunk do have."""
    found = set(related)
    if (key.fingerprint, key.dtype) in found:
        return MissReason.OTHER_PREFIX
    if any(fingerprint == key.fingerprint for fingerprint, _ in found):
        return MissReason.OTHER_DTYPE
    return MissReason.OTHER_MODEL if found else MissReason.NEVER_WARMED
