"""What other processes do in the tests."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from blend_rag.stores import DiskStore
from tests.stores.cases import is_kv, key, kv


def write_until_killed(folder: Path, start: int, tokens: int, acknowledged: Connection) -> None:
    """Put chunk after chunk and say so after each."""
    store = DiskStore(folder)
    for number in range(start, start + 100_000):
        store.put(key(number), kv(number, tokens), [f"document {number}"])
        acknowledged.send(number)


def write_and_read(folder: Path, max_bytes: int, seed: int, results: Connection) -> None:
    """Put, get and delete what another process does too; sends how many gets gave something wrong, and how many hit."""
    store, wrong, hits = DiskStore(folder, max_bytes), 0, 0
    for step in range(150):
        number = (step * 7 + seed) % 12
        if step % 3 == 0:
            store.put(key(number), kv(number))
        elif step % 11 == 0:
            store.delete(key(number))
        else:
            found = store.get(key(number))
            hits += found is not None
            wrong += found is not None and not is_kv(found, number)
    store.close()
    results.send((wrong, hits))


def write_some(folder: Path, numbers: list[int]) -> None:
    store = DiskStore(folder)
    for number in numbers:
        store.put(key(number), kv(number))
    store.close()
