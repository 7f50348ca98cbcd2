"""What all store tests use: keys, chunk KV that tells which put it came from, and random operations."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores import KVStore

BYTES = 2 * 2 * 4 * 1 * 8 * 4  # of `kv(...)`


def key(number: int, **change: object) -> ChunkKey:
    parts: dict = {"fingerprint": "model", "dtype": "float32", "namespace": "", "context_ids": ()}
    return ChunkKey.of((number,), **{**parts, **change})


def kv(value: float, tokens: int = 4) -> ChunkKV:
    return ChunkKV(torch.full((2, 2, tokens, 1, 8), float(value)))


def is_kv(found: ChunkKV | None, value: float, tokens: int = 4) -> bool:
    return found is not None and torch.equal(found.data, kv(value, tokens).data)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "get", "get", "delete", "pin", "unpin", "link", "delete_document")),
        st.integers(0, 6),
        st.integers(1, 6),
    ),
    max_size=50,
)


def run_operations(store: KVStore, operations: list[tuple[str, int, int]], check: Callable[[KVStore], None]) -> None:
    """Every `get` gives what was last put under that key, or nothing; `check` holds after every step."""
    expected: dict[int, tuple[int, int]] = {}
    for step, (name, number, tokens) in enumerate(operations):
        document = f"document {number % 3}"
        if name == "put":
            try:
                store.put(key(number), kv(step, tokens), [document])
                expected[number] = (step, tokens)
            except StoreError:
                pass
        elif name == "get" and (found := store.get(key(number))) is not None:
            assert is_kv(found, *expected[number])
        elif name == "delete":
            store.delete(key(number))
            assert store.get(key(number)) is None
        elif name == "link":
            store.link(key(number), [document])
        elif name == "delete_document":
            unused = store.keys_of(document)
            store.delete_document(document)
            assert not any(found in store for found in unused)
            assert store.keys_of(document) == ()
        elif name in ("pin", "unpin"):
            getattr(store, name)([key(number)])
        check(store)


def wait_for(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return once it holds; fail when it never does."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.01)
