"""Where a worker finds chunk KV: the GPU, host memory, then a store behind both.

Memory is looked at while the scheduler's step runs; the store is asked in threads, so that a slow one delays the
requests that need it and nothing else. Each rank keeps its own heads in memory; the store holds all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from vllm.logger import init_logger

from blend_rag.blend.decoder import AttentionShape
from blend_rag.engines.keeper import ChunkKeeper
from blend_rag.errors import StoreError
from blend_rag.kv import STORE_DTYPES, ChunkKey, ChunkKV
from blend_rag.stores import KVStore, MemoryStore, MissReason
from blend_rag.vllm.decoder import VLLMDecoder

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown

GPU, HOST, STORE = "gpu", "host", "store"
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """This rank's heads of a chunk's KV, and the tier they came from."""

    kv: ChunkKV
    tier: str


Answer = Found | MissReason


@dataclass(frozen=True, slots=True)
class Query:
    """A chunk that is asked for."""

    chunk_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    document: str | None = None

    @property
    def documents(self) -> tuple[str, ...]:
        return (self.document,) if self.document else ()


class WorkerTiers:
    """Chunk KV of one model and namespace on one rank.

    Args:
        decoder: the model, its ranks and its device.
        fingerprint: of the model.
        dtype: of kept KV.
        namespace: of this server.
        total_kv_heads: over all ranks.
        gpu_bytes, host_bytes: bounds of the tiers in memory; 0 leaves one out.
        store: behind them, or None.
        timeout_s: how long to wait for the store.
    """

    def __init__(
        self,
        decoder: VLLMDecoder,
        *,
        fingerprint: str,
        dtype: str,
        namespace: str,
        total_kv_heads: int,
        gpu_bytes: int,
        host_bytes: int,
        store: KVStore | None,
        timeout_s: float,
    ) -> None:
        self._decoder = decoder
        self._on_gpu = decoder.device.type != "cpu"
        self.dtype = STORE_DTYPES[dtype]
        self._total_kv_heads = total_kv_heads
        self._timeout_s = timeout_s
        self._gpu_bytes = gpu_bytes
        self._gpu = MemoryStore(gpu_bytes) if gpu_bytes else None  # where the model runs
        self._host = MemoryStore(host_bytes) if host_bytes else None
        self._store = store
        shape = decoder.shape
        whole = AttentionShape(shape.layers, shape.heads, total_kv_heads, shape.head_dim, shape.scale)
        behind = store or self._host or MemoryStore(1)
        self._keeper = ChunkKeeper(behind, fingerprint, dtype, namespace, whole if store else shape)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="blend-rag-store")

    def key(self, query: Query) -> ChunkKey:
        return self._keeper.key(query.chunk_ids, query.context_ids)

    def look(self, query: Query) -> Lookup:
        """Begin to look for a chunk; does not wait."""
        key = self.key(query)
        for tier, name in ((self._gpu, GPU), (self._host, HOST)):
            kv = tier.get(key) if tier else None
            if kv is not None:
                return Lookup(Found(kv, name))
        if self._store is None:
            reason = self._host.why_missing(key) if self._host else MissReason.NEVER_WARMED
            return Lookup(reason)
        return Lookup(None, self._pool.submit(self._load, query), time.monotonic() + self._timeout_s)

    def _load(self, query: Query) -> Answer:
        found = self._keeper.find(query.chunk_ids, query.context_ids, query.document)
        if not isinstance(found, ChunkKV):
            return found
        own = self._own(found.data)
        self._remember(self._host, self.key(query), own, query.documents)
        return Found(own, STORE)

    def where(self, query: Query) -> Future[str | MissReason]:
        """The fastest tier that has a chunk, or why none has; nothing is loaded."""
        return self._pool.submit(self._where, query)

    def _where(self, query: Query) -> str | MissReason:
        key = self.key(query)
        for tier, name in ((self._gpu, GPU), (self._host, HOST)):
            if tier and key in tier:
                return name
        if self._store is None:
            return self._host.why_missing(key) if self._host else MissReason.NEVER_WARMED
        return self._keeper.why_absent(query.chunk_ids, query.context_ids, query.document) or STORE

    def _own(self, data: torch.Tensor) -> ChunkKV:
        """A copy of this rank's heads, pinned where a GPU will read them; a store may hand out mapped files."""
        own = self._decoder.own_heads(data)
        return ChunkKV(own.contiguous().pin_memory() if self._on_gpu else own.clone())

    @contextmanager
    def without_gpu(self) -> Iterator[None]:
        """Leave the GPU tier out for a while, to measure what host memory gives."""
        gpu, self._gpu = self._gpu, None
        try:
            yield
        finally:
            self._gpu = gpu

    def in_memory(self, query: Query) -> bool:
        """Whether a tier in memory holds a chunk."""
        key = self.key(query)
        return any(key in tier for tier in (self._gpu, self._host) if tier)

    def keep(self, query: Query, kv: ChunkKV) -> list[Future[str | None]]:
        """Keep new KV of this rank in every tier; what to wait for until the store has it, each a complaint or None.

        All ranks call this together. `kv` lies where the model runs.
        """
        key = self.key(query)
        if self._gpu:
            self._remember(self._gpu, key, kv, query.documents)
        whole = self._decoder.all_heads(kv.data, self._total_kv_heads) if self._store else None
        own_host = _to_host(kv.data) if self._host else None
        whole_host = None
        if whole is not None and self._decoder.rank == 0:
            whole_host = own_host if own_host and self._decoder.ranks == 1 else _to_host(whole)
        return [self._pool.submit(self._put, key, own_host, whole_host, query.documents)]

    def _put(
        self, key: ChunkKey, own: _OnItsWay | None, whole: _OnItsWay | None, documents: Sequence[str]
    ) -> str | None:
        if own:
            self._remember(self._host, key, ChunkKV(own.wait()), documents)
        if whole and self._store:
            try:
                self._store.put(key, ChunkKV(whole.wait()), documents)
            except StoreError as error:
                return str(error)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return None

    def link(self, query: Query) -> list[Future[str | None]]:
        """Note that KV that is there comes from a document too; what to wait for."""
        for tier in (self._gpu, self._host):
            if tier:
                tier.link(self.key(query), query.documents)
        if not query.documents or not self._store or self._decoder.rank:
            return []
        return [self._pool.submit(self._link, self.key(query), query.documents)]

    def _link(self, key: ChunkKey, documents: Sequence[str]) -> str | None:
        try:
            assert self._store is not None
            self._store.link(key, documents)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def forget_document(self, document: str) -> Future[int]:
        """Delete the KV that no other document uses, in every tier; how many chunks the last tier had."""
        return self._pool.submit(self._forget_document, document)

    def _forget_document(self, document: str) -> int:
        namespace, count = self._keeper.namespace, 0
        for tier in (self._gpu, self._host):
            count = max(count, tier.delete_document(document, namespace) if tier else 0)
        if self._store and not self._decoder.rank:
            count = self._store.delete_document(document, namespace)
        return count

    @property
    def has_gpu(self) -> bool:
        """Whether there is a tier where the model runs."""
        return self._gpu is not None

    def promote(self, query: Query, kv: ChunkKV) -> bool:
        """Keep a copy of KV from host memory on the GPU; whether it was not there yet."""
        if self._gpu is None or kv.nbytes > self._gpu_bytes or self.key(query) in self._gpu:
            return False
        copy = ChunkKV(kv.data.to(self._decoder.device, non_blocking=True))
        self._remember(self._gpu, self.key(query), copy, query.documents)
        return True

    @staticmethod
    def _remember(tier: MemoryStore | None, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        if tier:
            try:
                tier.put(key, kv, documents)
            except StoreError as error:
                logger.debug("chunk KV not kept in memory: %s", error)

    def use_fingerprint(self, fingerprint: str) -> None:
        """From now on keys are those of other weights."""
        self._keeper = replace(self._keeper, fingerprint=fingerprint)

    def clear(self) -> None:
        """Forget what is in memory; the store keeps what it has."""
        for tier in (self._gpu, self._host):
            if tier:
                tier.purge()

    def close(self) -> None:
        """Stop the threads and close the store."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._store:
            self._store.close()


@dataclass(slots=True)
class Lookup:
    """A chunk that is looked for."""

    _answer: Answer | None
    _future: Future[Answer] | None = None
    _deadline: float = 0.0

    def ready(self) -> bool:
        """Whether there is an answer, be it that the store is too slow."""
        if self._answer is None and self._future is not None:
            if self._future.done():
                error = self._future.exception()
                if error:
                    logger.warning("chunk KV could not be loaded (%s: %s)", type(error).__name__, error)
                self._answer = MissReason.FAILED if error else self._future.result()
            elif time.monotonic() >= self._deadline:
                self._future.cancel()
                self._answer = MissReason.TOO_SLOW
        return self._answer is not None

    @property
    def found(self) -> Found | None:
        """What was found, once `ready`."""
        return self._answer if isinstance(self._answer, Found) else None

    @property
    def reason(self) -> MissReason | None:
        """Why nothing was found, once `ready`."""
        return self._answer if isinstance(self._answer, MissReason) else None


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A copy to host memory under way."""

    data: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        if self.event:
            self.event.synchronize()
        return self.data


def _to_host(data: torch.Tensor) -> _OnItsWay:
    if data.device.type == "cpu":
        return _OnItsWay(data, None)
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    host.copy_(data, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return _OnItsWay(host, event)
