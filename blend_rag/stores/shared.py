"""A `KVStore` over a tier that others can write to: signed objects, deadlines, and a pause after a fault.

Knows how chunks become objects; a transport knows how objects get there and back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores.base import MissReason, StoreStats, VerifyReport, explain
from blend_rag.stores.counters import Counters
from blend_rag.stores.envelope import HEADER_BYTES, Header, RejectedError, Sealer

logger = logging.getLogger(__name__)

T = TypeVar("T")
_REMEMBERED = 10_000


class Transport(Protocol):
    """Named objects somewhere else. Exceptions that are not named here are faults of the tier."""

    tier: str
    """Where, without passwords."""
    max_part_bytes: int

    def read(self, name: str, size: int) -> np.ndarray | None:
        """The object's bytes, [size] and writable, or None if there is none.

        Raises:
            RejectedError: it has another size.
            StoreError: the tier is well but refuses.
        """
        ...

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Put an object.

        Raises:
            StoreError: the tier is well but refuses.
        """
        ...

    def exists(self, name: str) -> bool: ...

    def remove(self, names: Sequence[str]) -> None: ...

    def names(self, prefix: str) -> Iterator[str]:
        """Names that begin so.

        Raises:
            StoreError: the tier cannot list.
        """
        ...

    def note(self, name: str, member: str) -> None:
        """Add to a set that outlives the objects; a tier without sets does nothing."""
        ...

    def noted(self, name: str) -> list[str]: ...

    def interrupt(self) -> None:
        """Give up operations under way, from another thread."""
        ...

    def close(self) -> None: ...


class SharedStore:
    """Chunk KV in a shared tier.

    Args:
        transport: moves the objects.
        sealer: signs and checks them.
        deadline_s: longest wait for `get` and other small operations; the chunk is computed after it.
        put_deadline_s: longest wait for `put`.
        pause_s: after a fault the tier is left alone that long, so that a dead one costs its deadline once.
    """

    def __init__(
        self,
        transport: Transport,
        sealer: Sealer,
        *,
        deadline_s: float = 2.0,
        put_deadline_s: float = 30.0,
        pause_s: float = 5.0,
    ) -> None:
        self._transport = transport
        self._sealer = sealer
        self._deadline_s = deadline_s
        self._put_deadline_s = put_deadline_s
        self._pause_s = pause_s
        self._paused_until = 0.0
        self._fault = MissReason.UNREACHABLE
        self._reasons: OrderedDict[str, MissReason] = OrderedDict()  # what the last `get` of a digest met
        self._counters = Counters()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SharedStore({self._transport.tier})"

    # Reading

    def get(self, key: ChunkKey) -> ChunkKV | None:
        try:
            kv = self._within(self._deadline_s, lambda: self._load(key))
            self._remember(key, None)
        except RejectedError as error:
            logger.warning("an object of %s was rejected: %s", self._transport.tier, error)
            self._counters.add(key.namespace, "damaged")
            self._remember(key, MissReason.FORGED if error.forged else MissReason.TORN)
            kv = None
        except (_FaultError, StoreError) as error:
            self._counters.add(key.namespace, "faults")
            self._remember(key, error.reason if isinstance(error, _FaultError) else MissReason.UNREACHABLE)
            kv = None
        self._counters.add(key.namespace, "misses" if kv is None else "hits")
        return kv

    def _load(self, key: ChunkKey) -> ChunkKV | None:
        name = self._sealer.name(key)
        packed = self._transport.read(name, HEADER_BYTES)
        if packed is None:
            return None
        content = packed.tobytes()
        return self._load_payload(name, content, self._sealer.read_header(content, key))

    def _load_payload(self, name: str, packed: bytes, header: Header) -> ChunkKV | None:
        parts: list[np.ndarray] = []
        for number, size in enumerate(header.part_sizes):
            part = self._transport.read(header.part_name(name, number), size)
            if part is None:  # evicted half-way, or not written yet
                return None
            parts.append(part)
        payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._sealer.open(header, packed, payload)

    def __contains__(self, key: ChunkKey) -> bool:
        def look() -> bool:
            name = self._sealer.name(key)
            packed = self._transport.read(name, HEADER_BYTES)
            if packed is None:
                return False
            header = self._sealer.read_header(packed.tobytes(), key)
            return all(self._transport.exists(header.part_name(name, i)) for i in range(len(header.part_sizes)))

        try:
            return self._within(self._deadline_s, look)
        except (_FaultError, RejectedError, StoreError):
            return False

    def why_missing(self, key: ChunkKey) -> MissReason:
        with self._lock:
            known = self._reasons.get(key.digest)
        if known:
            return known
        try:
            noted = self._within(self._deadline_s, lambda: self._transport.noted(self._sealer.related_name(key)))
        except _FaultError as error:
            return error.reason
        except StoreError:
            return MissReason.UNREACHABLE
        if key.digest in noted:
            return MissReason.EVICTED
        return explain(key, [(parts[0], parts[1]) for line in noted if len(parts := line.split(" ")) == 2])

    # Writing

    def put(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        header, packed, payload = self._sealer.seal(key, kv, self._transport.max_part_bytes)

        def write() -> None:
            name, at = self._sealer.name(key), 0
            older = self._parts_of(name)
            for number, size in enumerate(header.part_sizes):
                self._transport.write(header.part_name(name, number), payload[at : at + size])
                at += size
            self._transport.write(name, packed)  # last: whoever finds the header finds the rest
            if stale := [part for part in older if not part.startswith(f"{name}.{header.tag.hex()[:16]}.")]:
                self._transport.remove(stale)
            related = self._sealer.related_name(key)
            self._transport.note(related, key.digest)
            self._transport.note(related, f"{key.fingerprint} {key.dtype}")

        try:
            self._within(self._put_deadline_s, write)
            self._remember(key, None)
        except _FaultError as error:
            self._counters.add(key.namespace, "faults")
            msg = f"{self._transport.tier} did not take chunk KV: {error}"
            raise StoreError(msg) from error

    def _parts_of(self, name: str) -> list[str]:
        """Payload objects of the header that is there."""
        try:
            packed = self._transport.read(name, HEADER_BYTES)
            if packed is None:
                return []
            header = self._sealer.read_header(packed.tobytes())
        except RejectedError:
            return []
        return [header.part_name(name, number) for number in range(len(header.part_sizes))]

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        """A shared tier knows no documents; the tier before it does."""

    def delete(self, key: ChunkKey) -> bool:
        def remove() -> bool:
            name = self._sealer.name(key)
            there = self._transport.exists(name)
            self._transport.remove([name, *self._parts_of(name)])
            return there

        try:
            return self._within(self._put_deadline_s, remove)
        except _FaultError as error:
            msg = f"{self._transport.tier} did not delete chunk KV: {error}"
            raise StoreError(msg) from error

    def keys_of(self, document: str, namespace: str = "") -> tuple[ChunkKey, ...]:
        """A shared tier knows no documents; the tier before it tells which keys to delete."""
        return ()

    def knows_document(self, document: str, namespace: str = "") -> bool:
        """A shared tier knows no documents."""
        return False

    def delete_document(self, document: str, namespace: str = "") -> int:
        """A shared tier knows no documents."""
        return 0

    def purge(self, namespace: str | None = None) -> int:
        names = self._names(namespace)
        headers = [name for name in names if _is_header(name)]
        self._in_words(lambda: self._transport.remove(names))
        return len(headers)

    def verify(self, namespace: str | None = None) -> VerifyReport:
        """Read and compare all objects. Rejected ones stay: with a wrong secret here, they may be right elsewhere."""
        checked, damaged = 0, []
        for name in filter(_is_header, self._names(namespace)):

            def load(name: str = name) -> ChunkKV | None:
                packed = self._transport.read(name, HEADER_BYTES)
                if packed is None:
                    return None
                header = self._sealer.read_header(packed.tobytes())
                if self._sealer.name(header.key) != name:
                    raise RejectedError("key of another object", forged=True)
                return self._load_payload(name, packed.tobytes(), header)

            checked += 1
            try:
                if self._in_words(load) is None:
                    damaged.append(name.rpartition(".")[2])
            except RejectedError:
                damaged.append(name.rpartition(".")[2])
        return VerifyReport(checked, tuple(damaged))

    def _names(self, namespace: str | None) -> list[str]:
        prefix = "" if namespace is None else f"{self._sealer.prefix(namespace)}."
        return self._in_words(lambda: list(self._transport.names(prefix)))

    def _in_words(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (StoreError, RejectedError):
            raise
        except Exception as error:
            msg = f"{self._transport.tier} cannot be used: {_said(error)}"
            raise StoreError(msg) from error

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """A shared tier evicts as its owner has set it up; pins hold in the tiers before it."""

    def unpin(self, keys: Iterable[ChunkKey]) -> None: ...

    def stats(self, namespace: str | None = None) -> StoreStats:
        try:
            chunks = self._within(self._deadline_s, lambda: sum(map(_is_header, self._names(namespace))))
        except (StoreError, _FaultError):
            chunks = None
        return StoreStats(self._transport.tier, chunks, None, None, **self._counters.of(namespace))

    def close(self) -> None:
        self._transport.close()

    # Faults

    def _remember(self, key: ChunkKey, reason: MissReason | None) -> None:
        with self._lock:
            self._reasons.pop(key.digest, None)
            if reason:
                self._reasons[key.digest] = reason
                if len(self._reasons) > _REMEMBERED:
                    self._reasons.popitem(last=False)

    def _within(self, deadline_s: float, work: Callable[[], T]) -> T:
        """Result of `work`, or a fault once the deadline is over; what hangs is left behind in its own thread."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                raise _FaultError(self._fault, "left alone after a fault")
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except Exception as error:  # whatever a client library raises is a fault of the tier
                done.put((None, error))

        threading.Thread(target=run, daemon=True, name="blend-rag shared store").start()
        try:
            result, error = done.get(timeout=deadline_s)
        except queue.Empty:
            self._transport.interrupt()
            raise self._fault_of(MissReason.TOO_SLOW, f"no answer within {deadline_s:g} s") from None
        if error is None:
            return result  # type: ignore[return-value]
        if isinstance(error, (RejectedError, StoreError)):
            raise error
        timed_out = isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower()
        raise self._fault_of(MissReason.TOO_SLOW if timed_out else MissReason.UNREACHABLE, _said(error)) from error

    def _fault_of(self, reason: MissReason, said: str) -> _FaultError:
        logger.warning("%s: %s; left alone for %g s", self._transport.tier, said, self._pause_s)
        with self._lock:
            self._fault = reason
            self._paused_until = time.monotonic() + self._pause_s
        return _FaultError(reason, said)


class _FaultError(Exception):
    def __init__(self, reason: MissReason, said: str) -> None:
        super().__init__(said)
        self.reason = reason


def _is_header(name: str) -> bool:
    return name.count(".") == 1


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
