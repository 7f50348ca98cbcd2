"""The disk store's index: which chunk lies in which file, for whom, since when. Knows sqlite, opens no chunk file.

Write-ahead logging lets several processes read while one writes. Whoever changes files does so inside `writing()`, so
files and index change under one lock.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blend_rag.kv import ChunkKey
from blend_rag.stores.base import MissReason

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    digest TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, dtype TEXT NOT NULL, namespace TEXT NOT NULL,
    context_hash TEXT NOT NULL, chunk_hash TEXT NOT NULL,
    file TEXT NOT NULL, bytes INTEGER NOT NULL, last_use REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_by_text ON chunks (namespace, chunk_hash);
CREATE INDEX IF NOT EXISTS chunks_by_use ON chunks (last_use, bytes);
CREATE TABLE IF NOT EXISTS documents (
    namespace TEXT NOT NULL, document TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (namespace, document, digest)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS documents_by_chunk ON documents (digest);
CREATE TABLE IF NOT EXISTS pins (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tombstones (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, reason TEXT NOT NULL
);
"""
_KEY = "fingerprint, dtype, namespace, context_hash, chunk_hash"


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk and its file; `bytes` is the file's size."""

    key: ChunkKey
    file: str
    bytes: int


class DiskIndex:
    """The sqlite file. Methods raise `sqlite3.Error` as it comes.

    Args:
        path: the file; made readable by its owner alone.
        max_tombstones: bound on remembered absences.
        timeout_s: how long to wait for another process that is writing.
    """

    def __init__(self, path: Path, *, max_tombstones: int = 100_000, timeout_s: float = 30.0) -> None:
        self._path = path
        self._max_tombstones = max_tombstones
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection = self._connect()
        self._pid = os.getpid()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # sqlite gives its side files the same mode
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # files are flushed; a lost row is found again at open
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                msg = "index fails its check"
                raise sqlite3.DatabaseError(msg)
            connection.executescript(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._pid != os.getpid():  # a connection must not be used on both sides of a fork
                self._connection, self._pid = self._connect(), os.getpid()
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction that no other process writes beside; nests."""
        with self._reading() as connection:
            if connection.in_transaction:
                yield
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def file_of(self, digest: str) -> str | None:
        with self._reading() as connection:
            row = connection.execute("SELECT file FROM chunks WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def entries(self, namespace: str | None = None) -> list[Entry]:
        """All chunks of a namespace, or of all, least recently used first."""
        return self._select("? IS NULL OR namespace = ?", (namespace, namespace))

    def evictable(self, but: str) -> list[Entry]:
        """Chunks that are not pinned and not `but`, least recently used first."""
        return self._select("digest <> ? AND digest NOT IN (SELECT digest FROM pins)", (but,))

    def _select(self, where: str, values: tuple[str | None, ...]) -> list[Entry]:
        query = f"SELECT {_KEY}, file, bytes FROM chunks WHERE {where} ORDER BY last_use"
        with self._reading() as connection:
            rows = connection.execute(query, values).fetchall()
        return [Entry(ChunkKey(*row[:5]), row[5], row[6]) for row in rows]

    def size(self, namespace: str | None = None) -> tuple[int, int]:
        """Number of chunks and sum of bytes."""
        query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM chunks WHERE ? IS NULL OR namespace = ?"
        with self._reading() as connection:
            count, total = connection.execute(query, (namespace, namespace)).fetchone()
        return int(count), int(total)

    def related(self, key: ChunkKey) -> list[tuple[str, str]]:
        """Fingerprint and dtype of KV of the same chunk in the same namespace."""
        query = "SELECT fingerprint, dtype FROM chunks WHERE namespace = ? AND chunk_hash = ?"
        with self._reading() as connection:
            return connection.execute(query, (key.namespace, key.chunk_hash)).fetchall()

    def tombstone(self, digest: str) -> MissReason | None:
        """Why KV that was here is not any more."""
        with self._reading() as connection:
            row = connection.execute("SELECT reason FROM tombstones WHERE digest = ?", (digest,)).fetchone()
        return MissReason(row[0]) if row else None

    def add(self, entry: Entry, documents: Iterable[str], last_use: float) -> None:
        """Enter a chunk, or its new file."""
        key = entry.key
        with self.writing():
            self._connection.execute(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(key.digest, key.fingerprint, key.dtype, key.namespace, key.context_hash, key.chunk_hash),
                    *(entry.file, entry.bytes, last_use),
                ),
            )
            self._connection.execute("DELETE FROM tombstones WHERE digest = ?", (key.digest,))
            self.link(key, documents)

    def link(self, key: ChunkKey, documents: Iterable[str]) -> None:
        """Note documents of a chunk."""
        rows = [(key.namespace, document, key.digest) for document in documents]
        if rows:
            with self.writing():
                self._connection.executemany("INSERT OR IGNORE INTO documents VALUES (?, ?, ?)", rows)

    def remove(self, digest: str, reason: MissReason | None = None) -> None:
        """Forget a chunk; with a reason, remember why."""
        with self.writing():
            self._connection.execute("DELETE FROM chunks WHERE digest = ?", (digest,))
            self._connection.execute("DELETE FROM documents WHERE digest = ?", (digest,))
            if reason is None:
                self._connection.execute("DELETE FROM pins WHERE digest = ?", (digest,))
                return
            self._connection.execute(
                "INSERT OR REPLACE INTO tombstones (digest, reason) VALUES (?, ?)", (digest, reason.value)
            )
            self._connection.execute(
                "DELETE FROM tombstones WHERE number <= (SELECT MAX(number) FROM tombstones) - ?",
                (self._max_tombstones,),
            )

    def only_in(self, document: str, namespace: str) -> list[Entry]:
        """Chunks of a document that no other document of the namespace uses."""
        return self._select(
            "digest IN (SELECT digest FROM documents WHERE namespace = ? AND document = ?) "
            "AND digest NOT IN (SELECT digest FROM documents WHERE document <> ?)",
            (namespace, document, document),
        )

    def knows_document(self, document: str, namespace: str) -> bool:
        query = "SELECT 1 FROM documents WHERE namespace = ? AND document = ? LIMIT 1"
        with self._reading() as connection:
            return connection.execute(query, (namespace, document)).fetchone() is not None

    def forget_document(self, document: str, namespace: str) -> None:
        with self.writing():
            self._connection.execute(
                "DELETE FROM documents WHERE namespace = ? AND document = ?", (namespace, document)
            )

    def touch(self, last_use: Mapping[str, float]) -> None:
        """Note when chunks were last used."""
        with self.writing():
            self._connection.executemany(
                "UPDATE chunks SET last_use = MAX(last_use, ?) WHERE digest = ?",
                [(when, digest) for digest, when in last_use.items()],
            )

    def pin(self, digests: Iterable[str]) -> None:
        with self.writing():
            self._connection.executemany("INSERT OR IGNORE INTO pins VALUES (?)", [(digest,) for digest in digests])

    def unpin(self, digests: Iterable[str]) -> None:
        with self.writing():
            self._connection.executemany("DELETE FROM pins WHERE digest = ?", [(digest,) for digest in digests])

    def close(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                self._connection.close()
