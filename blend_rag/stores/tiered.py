"""Several stores as one: the fast ones in front, what lasts and what is shared behind."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Sequence

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores.base import KVStore, MissReason, StoreStats, VerifyReport
from blend_rag.stores.memory import MemoryStore

logger = logging.getLogger(__name__)

_TELLING = (  # reasons from the most to the least telling
    MissReason.FORGED,
    MissReason.TORN,
    MissReason.TOO_SLOW,
    MissReason.UNREACHABLE,
    MissReason.FAILED,
    MissReason.EVICTED,
    MissReason.OTHER_PREFIX,
    MissReason.OTHER_DTYPE,
    MissReason.OTHER_MODEL,
    MissReason.NEVER_WARMED,
)
_PROMOTIONS = 64
"""Chunks that may wait to be copied to the tiers in front; more are not copied."""


class TieredStore:
    """A `KVStore` over several.

    `get` asks front to back; what it finds behind is copied to the front, in memory at once and elsewhere in the
    background. `put` writes to all.

    Args:
        tiers: front to back.

    Raises:
        StoreError: there is no tier.
    """

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            msg = "a tiered store needs at least one tier"
            raise StoreError(msg)
        self.tiers = tuple(tiers)
        self._promotions: queue.Queue[tuple[KVStore, ChunkKey, ChunkKV, int] | None] = queue.Queue(_PROMOTIONS)
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()  # of promotions to memory and of the worker's start
        self._copying = threading.Lock()  # of promotions in the background
        self._deletions = 0  # what was found before a deletion is not promoted after it

    def get(self, key: ChunkKey) -> ChunkKV | None:
        deletions = self._deletions
        for depth, tier in enumerate(self.tiers):
            kv = tier.get(key)
            if kv is not None:
                for front in self.tiers[:depth]:
                    self._promote(front, key, kv, deletions)
                return kv
        return None

    def _promote(self, tier: KVStore, key: ChunkKey, kv: ChunkKV, deletions: int) -> None:
        with self._lock:
            if isinstance(tier, MemoryStore):
                if deletions == self._deletions:
                    _copy(tier, key, kv)
                return
            if self._worker is None:
                self._worker = threading.Thread(target=self._copy_promoted, daemon=True, name="blend-rag promotion")
                self._worker.start()
        try:
            self._promotions.put_nowait((tier, key, kv, deletions))
        except queue.Full:
            logger.debug("too much to copy: a chunk stays where it is")

    def _copy_promoted(self) -> None:
        while (item := self._promotions.get()) is not None:
            tier, key, kv, deletions = item
            with self._copying:
                if deletions == self._deletions:
                    _copy(tier, key, kv)
            self._promotions.task_done()

    def _stop_promotions(self) -> None:
        """Nothing found before now comes to the front any more."""
        with self._lock, self._copying:
            self._deletions += 1

    def flush(self) -> None:
        """Wait until what was found behind has been copied to the front."""
        self._promotions.join()

    def put(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        documents = tuple(documents)
        refused: list[str] = []
        kept = 0
        for tier in self.tiers:
            try:
                tier.put(key, kv, documents)
                kept += 1
            except StoreError as error:
                if not isinstance(tier, MemoryStore) or len(self.tiers) == 1:
                    refused.append(str(error))
        if refused or not kept:
            msg = "; ".join(refused) or "no tier has room for chunk KV"
            raise StoreError(f"{msg} (kept in {kept} of {len(self.tiers)} tiers)")

    def __contains__(self, key: ChunkKey) -> bool:
        return any(key in tier for tier in self.tiers)

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        """Note documents, and copy the chunk to lasting tiers that lack it."""
        documents = tuple(documents)
        for tier in self.tiers:
            if key in tier:
                tier.link(key, documents)
            elif not isinstance(tier, MemoryStore) and (kv := self.get(key)) is not None:
                tier.put(key, kv, documents)

    def delete(self, key: ChunkKey) -> bool:
        self._stop_promotions()
        there = [tier.delete(key) for tier in self.tiers]  # in all of them
        return any(there)

    def keys_of(self, document: str, namespace: str = "") -> tuple[ChunkKey, ...]:
        """The deepest tier that knows the document decides."""
        for tier in reversed(self.tiers):
            if keys := tier.keys_of(document, namespace):
                return keys
        return ()

    def knows_document(self, document: str, namespace: str = "") -> bool:
        return any(tier.knows_document(document, namespace) for tier in self.tiers)

    def delete_document(self, document: str, namespace: str = "") -> int:
        unused = self.keys_of(document, namespace)
        self._stop_promotions()
        for tier in reversed(self.tiers):  # a tier that fails leaves those that know the document as they are
            for key in unused:
                tier.delete(key)
            tier.delete_document(document, namespace)
        return len(unused)

    def purge(self, namespace: str | None = None) -> int:
        self._stop_promotions()
        gone, failed = 0, []
        for tier in self.tiers:
            try:
                gone = max(gone, tier.purge(namespace))
            except StoreError as error:
                failed.append(str(error))
        if failed:
            raise StoreError("; ".join(failed))
        return gone

    def verify(self, namespace: str | None = None) -> VerifyReport:
        found = VerifyReport(0)
        for tier in self.tiers:
            if not isinstance(tier, MemoryStore):
                found += tier.verify(namespace)
        return found

    def why_missing(self, key: ChunkKey) -> MissReason:
        return min((tier.why_missing(key) for tier in self.tiers), key=_TELLING.index)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        keys = tuple(keys)
        for tier in self.tiers:
            tier.pin(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        keys = tuple(keys)
        for tier in self.tiers:
            tier.unpin(keys)

    def stats(self, namespace: str | None = None) -> StoreStats:
        """Chunks and bytes of the largest tier; hits of all tiers, misses of the last."""
        tiers = tuple(tier.stats(namespace) for tier in self.tiers)
        return StoreStats(
            tier=" → ".join(tier.tier for tier in tiers),
            chunks=max((tier.chunks for tier in tiers if tier.chunks is not None), default=None),
            bytes=max((tier.bytes for tier in tiers if tier.bytes is not None), default=None),
            max_bytes=None,
            hits=sum(tier.hits for tier in tiers),
            misses=tiers[-1].misses,
            evictions=sum(tier.evictions for tier in tiers),
            damaged=sum(tier.damaged for tier in tiers),
            faults=sum(tier.faults for tier in tiers),
            tiers=tiers,
        )

    def close(self) -> None:
        if self._worker is not None:
            self._promotions.put(None)
            self._worker.join()
        for tier in self.tiers:
            tier.close()


def _copy(tier: KVStore, key: ChunkKey, kv: ChunkKV) -> None:
    try:
        tier.put(key, kv)
    except StoreError as error:
        logger.debug("chunk KV was not copied to the front: %s", error)
