"""An engine's side of its store: keys, lookups that cannot fail, and filling in what is missing.

Whatever a store does wrong costs time only: every exception and every misshapen object is a miss with a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from blend_rag.blend.decoder import AttentionShape
from blend_rag.errors import StoreError
from blend_rag.kv import STORE_DTYPES, ChunkKey, ChunkKV
from blend_rag.stores import KVStore, MissReason

logger = logging.getLogger(__name__)

TokenIds = tuple[int, ...]
_BATCH_TOKENS = 2048


@dataclass(slots=True)
class Filled:
    """What filling in did."""

    present: int = 0
    computed: int = 0
    tokens_computed: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChunkKeeper:
    """Chunk KV of one model, dtype and namespace in a store."""

    store: KVStore
    fingerprint: str
    dtype: str
    namespace: str
    shape: AttentionShape

    @property
    def torch_dtype(self) -> torch.dtype:
        return STORE_DTYPES[self.dtype]

    def key(self, chunk_ids: Sequence[int], context_ids: Sequence[int] = ()) -> ChunkKey:
        return ChunkKey.of(
            chunk_ids,
            fingerprint=self.fingerprint,
            dtype=self.dtype,
            namespace=self.namespace,
            context_ids=context_ids,
        )

    def find(
        self, chunk_ids: Sequence[int], context_ids: Sequence[int], document: str | None = None
    ) -> ChunkKV | MissReason:
        """KV of a chunk computed behind `context_ids`, or why there is none."""
        key = self.key(chunk_ids, context_ids)
        try:
            kv = self.store.get(key)
            if kv is None:
                return self._why_missing(key, document)
        except Exception as error:
            self._report("looked up", error)
            return MissReason.FAILED
        expected = (self.shape.layers, 2, len(chunk_ids), self.shape.kv_heads, self.shape.head_dim)
        if tuple(kv.data.shape) != expected or kv.data.dtype is not self.torch_dtype:
            logger.warning("stored chunk KV is %s %s, not %s", kv.data.dtype, tuple(kv.data.shape), expected)
            return MissReason.OTHER_SHAPE
        return kv

    def why_absent(
        self, chunk_ids: Sequence[int], context_ids: Sequence[int], document: str | None = None
    ) -> MissReason | None:
        """Why there is no KV of a chunk, or None where there is; it is not read."""
        key = self.key(chunk_ids, context_ids)
        try:
            return None if key in self.store else self._why_missing(key, document)
        except Exception as error:
            self._report("looked up", error)
            return MissReason.FAILED

    def _why_missing(self, key: ChunkKey, document: str | None) -> MissReason:
        reason = self.store.why_missing(key)
        if reason is MissReason.NEVER_WARMED and document and self.store.knows_document(document, self.namespace):
            return MissReason.TEXT_DIFFERS
        return reason

    def fill(
        self,
        chunks: Mapping[TokenIds, Iterable[str]],
        context_ids: TokenIds,
        compute: Callable[[list[TokenIds]], list[ChunkKV]],
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Filled:
        """Compute and keep what the store lacks, batch by batch.

        The store is asked again before every batch, so that processes that fill the same store share the work.

        Args:
            chunks: token ids of each chunk and the documents it comes from.
            context_ids: what the chunks are computed behind.
            compute: KV of a batch of chunks behind that context.
            progress: told the tokens of every batch, present or computed.
        """
        done = Filled()
        for batch in _batches(chunks):
            missing = [chunk for chunk in batch if not self._note_present(chunk, context_ids, chunks[chunk], done)]
            for chunk, kv in zip(missing, compute(missing) if missing else [], strict=True):
                self._keep(self.key(chunk, context_ids), kv, chunks[chunk], done.refused)
            done.present += len(batch) - len(missing)
            done.computed += len(missing)
            done.tokens_computed += sum(map(len, missing))
            progress(sum(map(len, batch)))
        return done

    def _note_present(self, chunk: TokenIds, context_ids: TokenIds, documents: Iterable[str], done: Filled) -> bool:
        key = self.key(chunk, context_ids)
        try:
            if key not in self.store:
                return False
            self.store.link(key, documents)
        except StoreError as error:  # it is there, but not everywhere
            done.refused.append(str(error))
            logger.warning("%s", error)
        except Exception as error:
            self._report("looked up", error)
            return False
        return True

    def _keep(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str], refused: list[str]) -> None:
        try:
            self.store.put(key, kv, documents)
        except StoreError as error:
            refused.append(str(error))
            logger.warning("chunk KV not kept: %s", error)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
            self._report("kept", error)

    @staticmethod
    def _report(what: str, error: Exception) -> None:
        logger.warning("chunk KV could not be %s (%s: %s)", what, type(error).__name__, error)


def _batches(chunks: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    batch: list[TokenIds] = []
    for chunk in chunks:
        if batch and sum(map(len, batch)) + len(chunk) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
