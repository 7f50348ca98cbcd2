"""Objects through LMCache's L2 adapters: the file system, Redis protocol, S3, Mooncake and others it ships.

Adapters want a buffer of the exact size, answer through event file descriptors, and some are unusable after a failed
load, so every object is looked up before it is loaded and a fault opens a new adapter. Tested with 0.5.1 and 0.5.6.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from blend_rag.errors import StoreError
from blend_rag.stores.envelope import RejectedError

_MODEL = "blend-rag"


class LMCacheTransport:
    """Objects in an L2 adapter.

    Args:
        kind: the adapter's registered name: "fs_native", "resp", "s3", "mooncake_store", …
        spec: the adapter's settings, as its configuration class takes them.
        timeout_s: longest wait for one operation.
        max_part_bytes: larger chunks are split.

    Raises:
        StoreError: LMCache is not installed, has no such adapter, or the adapter refuses its settings.
    """

    def __init__(
        self, kind: str, spec: Mapping[str, Any], *, timeout_s: float = 2.0, max_part_bytes: int = 256 << 20
    ) -> None:
        self._kind = kind
        self._spec = dict(spec)
        self._timeout_s = timeout_s
        self.max_part_bytes = max_part_bytes
        where = ":".join(str(spec[part]) for part in ("base_path", "host", "port", "bucket") if part in spec)
        self.tier = f"lmcache {kind} {where}".strip()
        self._lock = threading.Lock()  # of the adapter's exchange
        self._waiters = {name: threading.Lock() for name in ("store", "lookup", "load")}
        self._abandoned: list[Any] = []  # buffers that an unfinished load may still write to
        self._adapter: Any = None
        self._adapter = self._open()

    def __repr__(self) -> str:
        return f"LMCacheTransport({self.tier})"

    def _open(self) -> Any:
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would report to its makers
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        try:
            from lmcache.v1.distributed.l2_adapters import create_l2_adapter
            from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        except ImportError as error:
            msg = f"this tier needs LMCache ({error}): pip install 'blend-rag[lmcache]'"
            raise StoreError(msg) from error
        try:
            return create_l2_adapter(get_l2_adapter_config_class(self._kind).from_dict(self._spec))
        except (ValueError, TypeError, ImportError) as error:
            msg = f"LMCache's {self._kind} adapter cannot be opened: {error}"
            raise StoreError(msg) from error

    def read(self, name: str, size: int) -> np.ndarray | None:
        if not self.exists(name):
            return None
        buffer = torch.empty(size, dtype=torch.uint8)
        adapter, objects = self._live(), [_memory_object(buffer)]
        self._abandoned.append(objects)
        loaded = self._wait(
            "load",
            adapter.get_load_event_fd(),
            lambda: adapter.submit_load_task([_object_key(name)], objects),
            adapter.query_load_result,
        )
        self._abandoned.remove(objects)
        with contextlib.suppress(Exception):
            adapter.submit_unlock([_object_key(name)])
        if not loaded.test(0):
            self._renew()  # a connection that has failed to load may be out of step
            raise RejectedError("size")
        return buffer.numpy()

    def write(self, name: str, content: bytes | memoryview) -> None:
        if self.exists(name):  # adapters keep the first object of a name
            self.remove([name])
            if self.exists(name):
                msg = f"{self.tier} cannot replace an object: delete it with the tier's own tools"
                raise StoreError(msg)
        data = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        adapter, objects = self._live(), [_memory_object(data)]
        self._abandoned.append(objects)
        finished: dict[int, Any] = {}

        def result(task: int) -> Any:
            finished.update(adapter.pop_completed_store_tasks())
            return finished.get(task)

        stored = self._wait(
            "store",
            adapter.get_store_event_fd(),
            lambda: adapter.submit_store_task([_object_key(name)], objects),
            result,
        )
        self._abandoned.remove(objects)
        if not stored.is_successful():
            self._renew()
            msg = f"{self.tier} did not store an object"
            raise ConnectionError(msg)

    def exists(self, name: str) -> bool:
        adapter = self._live()
        found = self._wait(
            "lookup",
            adapter.get_lookup_and_lock_event_fd(),
            lambda: adapter.submit_lookup_and_lock_task([_object_key(name)], {}),
            adapter.query_lookup_and_lock_result,
        )
        return bool(found.test(0))

    def remove(self, names: Sequence[str]) -> None:
        adapter = self._live()
        keys = [_object_key(name) for name in names]
        adapter.submit_unlock(keys)
        adapter.delete(keys)

    def names(self, prefix: str) -> Iterator[str]:
        msg = f"{self.tier} cannot list what it holds: use its own tools"
        raise StoreError(msg)

    def note(self, name: str, member: str) -> None:
        """Adapters hold no sets."""

    def noted(self, name: str) -> list[str]:
        return []

    def interrupt(self) -> None:
        self._renew()

    def close(self) -> None:
        with self._lock:
            adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()

    def _live(self) -> Any:
        with self._lock:
            if self._adapter is None:
                self._adapter = self._open()
            return self._adapter

    def _renew(self) -> None:
        """The next operation opens a new adapter; the old one is closed where nobody waits for it."""
        with self._lock:
            adapter, self._adapter = self._adapter, None
        if adapter is not None:
            threading.Thread(target=_close_quietly, args=(adapter,), daemon=True).start()

    def _wait(self, kind: str, signal: int, submit: Callable[[], int], result: Callable[[int], Any]) -> Any:
        """Result of a task; one waiter at a time, because a signal does not say whose task has ended."""
        until = time.monotonic() + self._timeout_s
        with self._waiters[kind]:
            task = submit()
            while True:
                ready, _, _ = select.select([signal], [], [], max(0.0, until - time.monotonic()))
                if ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(signal, 8)
                found = result(task)
                if found is not None:
                    return found
                if time.monotonic() >= until:
                    self._renew()
                    msg = f"{self.tier} did not answer within {self._timeout_s:g} s"
                    raise TimeoutError(msg)


def _close_quietly(adapter: Any) -> None:
    with contextlib.suppress(Exception):
        adapter.close()


def _object_key(name: str) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=hashlib.sha256(name.encode()).digest(), model_name=_MODEL, kv_rank=0)


def _memory_object(data: torch.Tensor) -> Any:
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    metadata = MemoryObjMetadata(shape=data.shape, dtype=data.dtype, address=0, phy_size=data.numel(), ref_count=1)
    return TensorMemoryObj(data, metadata, None)
