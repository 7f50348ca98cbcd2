"""Chunk KV on a local disk: one safetensors file a chunk, an sqlite index, several processes at once.

A file's name holds its key and the checksum of all its bytes, so a torn, flipped or swapped file cannot be read as
something it is not. Files appear by rename after a flush: what `put` has acknowledged survives a crash.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import xxhash
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from blend_rag.errors import StoreError
from blend_rag.kv import FORMAT_VERSION, ChunkKey, ChunkKV
from blend_rag.stores.base import MissReason, StoreStats, VerifyReport, explain
from blend_rag.stores.counters import Counters
from blend_rag.stores.index import DiskIndex, Entry

logger = logging.getLogger(__name__)

_INDEX = "index.sqlite"
_TENSOR = "kv"
_SUFFIX = ".safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors writes them
_BLOCK_BYTES = 8 << 20
_TOUCH_SECONDS = 5.0
"""How long uses are noted in memory before they are written to the index."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskStore:
    """A `KVStore` in a folder of a local disk. Processes may share it; network file systems are not supported.

    Args:
        folder: made if missing, and readable by its owner alone.
        max_bytes: bound on the chunk files, over all processes.
        max_tombstones: bound on remembered evictions, which let a miss say why.

    Raises:
        StoreError: the bound is not positive, or the folder cannot be used.
    """

    def __init__(self, folder: str | Path, max_bytes: int = 20 << 30, *, max_tombstones: int = 100_000) -> None:
        if max_bytes <= 0:
            msg = f"max_bytes={max_bytes} leaves no room: give the store a positive size"
            raise StoreError(msg)
        self.folder = Path(folder).expanduser().absolute()
        self._max_bytes = max_bytes
        self._objects = self.folder / "objects"
        self._unfinished = self.folder / "unfinished"
        self._counters = Counters()
        self._failed: set[str] = set()  # digests whose last `get` failed without proof of damage
        self._touched: dict[str, float] = {}
        self._touches_written = time.time()
        self._lock = threading.Lock()
        self._mine = uuid.uuid4().hex
        try:
            self._make_folders()
            self._index = self._open_index(max_tombstones)
            with self._index.writing():
                self._living = FileLock(self._unfinished / f"{self._mine}.lock", mode=0o600)
                self._living.acquire()
                (self._unfinished / self._mine).mkdir(mode=0o700)
                self._remove_unfinished()
                self._reconcile()
        except (OSError, sqlite3.Error) as error:
            msg = f"the store folder {self.folder} cannot be used ({error}): choose a local folder that you own"
            raise StoreError(msg) from error

    # Reading

    def get(self, key: ChunkKey) -> ChunkKV | None:
        try:
            kv = self._find(key)
        except (OSError, sqlite3.Error) as error:
            logger.warning("chunk KV could not be looked up in %s: %s", self.folder, error)
            self._failed.add(key.digest)
            self._counters.add(key.namespace, "faults")
            kv = None
        else:
            self._failed.discard(key.digest)
        self._counters.add(key.namespace, "misses" if kv is None else "hits")
        if kv is not None:
            self._touch(key.digest)
        return kv

    def _find(self, key: ChunkKey) -> ChunkKV | None:
        name = self._index.file_of(key.digest)
        while name is not None:
            try:
                return self._read(key, name)
            except (FileNotFoundError, _DamagedError) as error:
                newer = self._index.file_of(key.digest)
                if newer == name:  # else another process has replaced it meanwhile
                    self._drop(key, name, error)
                    return None
                name = newer
        return None

    def _read(self, key: ChunkKey, name: str) -> ChunkKV:
        """Chunk KV mapped from its file, after all bytes were compared with the checksum in the file's name."""
        content = _mapped(self._path(name))
        if name != _file_name(key, _checksum(content)):
            raise _DamagedError("checksum")
        length = int.from_bytes(content[:8], "little")
        try:
            header = json.loads(bytes(content[8 : 8 + length]))
            if header["__metadata__"]["digest"] != key.digest:
                raise _DamagedError("key of another chunk")
            dtype, shape = _DTYPES[header[_TENSOR]["dtype"]], header[_TENSOR]["shape"]
            return ChunkKV(torch.frombuffer(content, dtype=dtype, offset=8 + length).view(shape))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _DamagedError(str(error)) from error

    def _drop(self, key: ChunkKey, name: str, error: Exception) -> None:
        logger.warning("chunk KV file %s is damaged and will be computed again: %s", name, error)
        self._counters.add(key.namespace, "damaged")
        with self._index.writing():
            if self._index.file_of(key.digest) == name:
                self._path(name).unlink(missing_ok=True)
                self._index.remove(key.digest, MissReason.TORN)

    def _touch(self, digest: str) -> None:
        now = time.time()
        with self._lock:
            self._touched[digest] = now
            due = now - self._touches_written > _TOUCH_SECONDS
        if due:
            with contextlib.suppress(sqlite3.Error):  # the order of eviction is not worth a failed read
                self._write_touches()

    def _write_touches(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
            self._touches_written = time.time()
        if touched:
            self._index.touch(touched)

    def __contains__(self, key: ChunkKey) -> bool:
        try:
            name = self._index.file_of(key.digest)
        except sqlite3.Error:
            return False
        return name is not None and self._path(name).is_file()

    def why_missing(self, key: ChunkKey) -> MissReason:
        if key.digest in self._failed:
            return MissReason.FAILED
        try:
            return self._index.tombstone(key.digest) or explain(key, self._index.related(key))
        except sqlite3.Error:
            return MissReason.FAILED

    # Writing

    def put(self, key: ChunkKey, kv: ChunkKV, documents: Iterable[str] = ()) -> None:
        documents = sorted(set(documents))
        data = kv.data.detach().cpu().contiguous()
        with self._words(), self._unfinished_file(data, _metadata(key, documents)) as unfinished:
            content = _mapped(unfinished)
            entry = Entry(key, _file_name(key, _checksum(content)), len(content))
            if entry.bytes > self._max_bytes:
                msg = (
                    f"a chunk file of {entry.bytes:,} bytes does not fit a store of {self._max_bytes:,} bytes: "
                    "raise max_bytes, or use smaller chunks"
                )
                raise StoreError(msg)
            self._write_touches()
            with self._index.writing():
                self._make_room(entry)
                older = self._index.file_of(key.digest)
                target = self._path(entry.file)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                unfinished.replace(target)
                try:
                    _flush_folder(target.parent)
                    self._index.add(entry, documents, time.time())
                except BaseException:
                    if older != entry.file:
                        target.unlink(missing_ok=True)
                    raise
                if older and older != entry.file:
                    self._path(older).unlink(missing_ok=True)

    @contextmanager
    def _unfinished_file(self, data: torch.Tensor, metadata: dict[str, str]) -> Iterator[Path]:
        """A flushed file of chunk KV; on a full disk older chunks make room."""
        path = self._unfinished / self._mine / uuid.uuid4().hex
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            while True:
                try:
                    _write_flushed(path, data, metadata)
                    break
                except OSError as error:
                    path.unlink(missing_ok=True)
                    if error.errno not in _FULL or not self._evict(data.nbytes):
                        raise
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make_room(self, newest: Entry) -> None:
        """Evict until `newest` fits the bound. Files go first: a crash in between leaves an index row, not a file."""
        older = self._index.file_of(newest.key.digest)
        replaced = self._path(older).stat().st_size if older and self._path(older).is_file() else 0
        excess = self._index.size()[1] - replaced + newest.bytes - self._max_bytes
        if excess > 0 and not self._evict(excess, newest.key.digest):
            msg = (
                f"chunk KV of {newest.bytes:,} bytes does not fit a store of {self._max_bytes:,} bytes "
                "beside what is pinned: raise max_bytes, or unpin"
            )
            raise StoreError(msg)

    def _evict(self, needed: int, but: str = "") -> bool:
        """Evict least recently used chunks of at least `needed` bytes, or none where that cannot be."""
        with self._index.writing():
            victims: list[Entry] = []
            for entry in self._index.evictable(but):
                if sum(victim.bytes for victim in victims) >= needed:
                    break
                victims.append(entry)
            if sum(victim.bytes for victim in victims) < needed:
                return False
            for victim in victims:
                self._remove(victim, MissReason.EVICTED)
                self._counters.add(victim.key.namespace, "evictions")
            return True

    def _remove(self, entry: Entry, reason: MissReason | None = None) -> None:
        self._path(entry.file).unlink(missing_ok=True)
        self._index.remove(entry.key.digest, reason)

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        with self._words(), self._index.writing():
            if self._index.file_of(key.digest):
                self._index.link(key, documents)

    def delete(self, key: ChunkKey) -> bool:
        with self._words(), self._index.writing():
            name = self._index.file_of(key.digest)
            self._remove(Entry(key, name or "", 0)) if name else self._index.remove(key.digest)
        return name is not None

    def keys_of(self, document: str, namespace: str = "") -> tuple[ChunkKey, ...]:
        with self._words():
            return tuple(entry.key for entry in self._index.only_in(document, namespace))

    def knows_document(self, document: str, namespace: str = "") -> bool:
        with self._words():
            return self._index.knows_document(document, namespace)

    def delete_document(self, document: str, namespace: str = "") -> int:
        with self._words(), self._index.writing():
            unused = self._index.only_in(document, namespace)
            for entry in unused:
                self._remove(entry)
            self._index.forget_document(document, namespace)
        return len(unused)

    def purge(self, namespace: str | None = None) -> int:
        with self._words(), self._index.writing():
            entries = self._index.entries(namespace)
            for entry in entries:
                self._remove(entry)
        return len(entries)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        with self._words():
            self._index.pin(key.digest for key in keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        with self._words():
            self._index.unpin(key.digest for key in keys)

    # Looking after it

    def verify(self, namespace: str | None = None) -> VerifyReport:
        with self._words():
            entries = self._index.entries(namespace)
            damaged = tuple(entry.key.digest for entry in entries if self._is_torn(entry.key))
        return VerifyReport(len(entries), damaged)

    def _is_torn(self, key: ChunkKey) -> bool:
        return self._find(key) is None and self._index.tombstone(key.digest) is MissReason.TORN

    def stats(self, namespace: str | None = None) -> StoreStats:
        with self._words():
            chunks, total = self._index.size(namespace)
        return StoreStats(f"disk {self.folder}", chunks, total, self._max_bytes, **self._counters.of(namespace))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._write_touches()
        self._index.close()
        shutil.rmtree(self._unfinished / self._mine, ignore_errors=True)
        self._living.release()
        Path(self._living.lock_file).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._objects / name[:2] / name

    @contextmanager
    def _words(self) -> Iterator[None]:
        """Turn failures to write into words."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            full = getattr(error, "errno", None) in _FULL or "disk is full" in str(error)
            what = "is full: free some space or lower max_bytes" if full else f"cannot be used: {error}"
            msg = f"the store folder {self.folder} {what}"
            raise StoreError(msg) from error

    # Opening

    def _make_folders(self) -> None:
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / _INDEX).is_file():
            msg = f"{self.folder} holds other files: choose a new or an empty folder for the store"
            raise StoreError(msg)
        for path in (self.folder, self._objects, self._unfinished):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)

    def _open_index(self, max_tombstones: int) -> DiskIndex:
        path = self.folder / _INDEX
        try:
            return DiskIndex(path, max_tombstones=max_tombstones)
        except sqlite3.OperationalError:
            raise  # locked or unreadable is not damaged
        except sqlite3.DatabaseError as error:
            logger.warning("the index %s is damaged (%s) and is built anew from the chunk files", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return DiskIndex(path, max_tombstones=max_tombstones)

    def _remove_unfinished(self) -> None:
        """Remove what processes that died left half-written: their locks are free."""
        for path in self._unfinished.glob("*.lock"):
            if path.stem == self._mine:
                continue
            lock = FileLock(path)
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
                shutil.rmtree(self._unfinished / path.stem, ignore_errors=True)
                lock.release()
                path.unlink(missing_ok=True)

    def _reconcile(self) -> None:
        """Make index and files agree after a crash: rows without a file go, files without a row come back."""
        files = {path.name: path for path in self._objects.glob(f"*/*{_SUFFIX}")}
        known = self._index.entries()
        for entry in known:
            if entry.file not in files:
                self._index.remove(entry.key.digest, MissReason.TORN)
        for name in files.keys() - {entry.file for entry in known}:
            self._adopt(files[name])
        excess = self._index.size()[1] - self._max_bytes
        if excess > 0:
            self._evict(excess)

    def _adopt(self, path: Path) -> None:
        """Enter a file without a row; its bytes are compared when it is read."""
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
            key = ChunkKey(*(metadata[part] for part in _KEY_PARTS))
            documents = json.loads(metadata["documents"])
        except (SafetensorError, KeyError, ValueError):
            path.unlink(missing_ok=True)
            return
        if not path.name.startswith(f"{key.digest}-") or self._index.file_of(key.digest):
            path.unlink(missing_ok=True)
            return
        stat = path.stat()
        self._index.add(Entry(key, path.name, stat.st_size), documents, stat.st_mtime)


class _DamagedError(Exception):
    """A file does not hold what its name says."""


_KEY_PARTS = ("fingerprint", "dtype", "namespace", "context_hash", "chunk_hash")


def _metadata(key: ChunkKey, documents: Iterable[str]) -> dict[str, str]:
    parts = {part: getattr(key, part) for part in _KEY_PARTS}
    return {
        **parts,
        "digest": key.digest,
        "format": str(FORMAT_VERSION),
        "documents": json.dumps(list(documents)),
    }


def _file_name(key: ChunkKey, checksum: str) -> str:
    return f"{key.digest}-{checksum}{_SUFFIX}"


def _mapped(path: Path) -> memoryview:
    """A file's bytes as the page cache holds them; writing to them would not change the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    except ValueError as error:
        raise _DamagedError("empty file") from error
    finally:
        os.close(descriptor)


def _checksum(content: memoryview) -> str:
    """XXH3-128, hex, of a chunk file; of its blocks' checksums where there are several, which threads compute."""
    blocks = [content[start : start + _BLOCK_BYTES] for start in range(0, len(content), _BLOCK_BYTES)]
    if len(blocks) == 1:
        return xxhash.xxh3_128_hexdigest(content)
    return xxhash.xxh3_128_hexdigest(b"".join(_hashers().map(xxhash.xxh3_128_digest, blocks)))


@cache  # made anew after a fork: threads do not cross it
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="blend-rag checksum")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hashers.cache_clear)


def _write_flushed(path: Path, data: torch.Tensor, metadata: dict[str, str]) -> None:
    try:
        save_file({_TENSOR: data}, path, metadata)
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise
    path.chmod(0o600)
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make a rename last; systems that cannot open folders do so by themselves."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
