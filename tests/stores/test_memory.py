"""The memory store: bounded, least recently used first, pins hold, misses have reasons."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blend_rag.errors import StoreError
from blend_rag.kv import ChunkKey, ChunkKV
from blend_rag.stores import MemoryStore, MissReason

BYTES = 2 * 2 * 4 * 1 * 8 * 4  # of `kv(...)`


def key(number: int, **change: object) -> ChunkKey:
    parts: dict = {"fingerprint": "model", "dtype": "float32", "namespace": "", "context_ids": ()}
    return ChunkKey.of((number,), **{**parts, **change})


def kv(value: float, tokens: int = 4) -> ChunkKV:
    return ChunkKV(torch.full((2, 2, tokens, 1, 8), float(value)))


def test_least_recently_used_goes_first_and_says_so() -> None:
    store = MemoryStore(max_bytes=2 * BYTES)
    store.put(key(1), kv(1))
    store.put(key(2), kv(2))
    store.get(key(1))
    store.put(key(3), kv(3))
    assert key(1) in store
    assert store.get(key(2)) is None
    assert store.why_missing(key(2)) is MissReason.EVICTED
    assert store.stats().evictions == 1


def test_pinned_chunks_stay() -> None:
    store = MemoryStore(max_bytes=2 * BYTES)
    store.put(key(1), kv(1))
    store.pin([key(1)])
    for number in (2, 3, 4):
        store.put(key(number), kv(number))
    assert key(1) in store
    assert key(3) not in store
    store.unpin([key(1)])
    store.put(key(5), kv(5))
    assert key(1) not in store


def test_what_can_never_fit_is_refused_and_nothing_is_lost() -> None:
    store = MemoryStore(max_bytes=2 * BYTES)
    store.put(key(1), kv(1))
    with pytest.raises(StoreError, match="raise max_bytes"):
        store.put(key(2), kv(2, tokens=9))
    store.pin([key(1)])
    with pytest.raises(StoreError, match="unpin"):
        store.put(key(3), kv(3, tokens=8))
    assert key(1) in store
    with pytest.raises(StoreError, match="positive"):
        MemoryStore(max_bytes=0)


def test_misses_name_their_reason() -> None:
    store = MemoryStore()
    store.put(key(1), kv(1))
    assert store.why_missing(key(2)) is MissReason.NEVER_WARMED
    assert store.why_missing(key(1, context_ids=(9,))) is MissReason.OTHER_PREFIX
    assert store.why_missing(key(1, fingerprint="other")) is MissReason.OTHER_MODEL
    assert store.why_missing(key(1, dtype="float16")) is MissReason.OTHER_DTYPE
    assert store.why_missing(key(1, namespace="tenant")) is MissReason.NEVER_WARMED, "another tenant learns nothing"


def test_delete_and_close_forget() -> None:
    store = MemoryStore()
    store.put(key(1), kv(1))
    store.pin([key(1)])
    assert store.delete(key(1))
    assert not store.delete(key(1))
    assert store.why_missing(key(1)) is MissReason.NEVER_WARMED
    store.put(key(2), kv(2))
    store.close()
    assert store.stats().bytes == 0
    assert store.get(key(2)) is None


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("put", "get", "delete", "pin", "unpin")), st.integers(0, 6), st.integers(1, 6)),
    max_size=60,
)


@given(OPERATIONS)
def test_bound_holds_and_a_key_never_returns_other_kv(operations) -> None:
    store, expected = MemoryStore(max_bytes=3 * BYTES), {}
    for step, (name, number, tokens) in enumerate(operations):
        if name == "put":
            try:
                store.put(key(number), kv(step, tokens))
                expected[number] = (step, tokens)
            except StoreError:
                pass
        elif name == "get" and (found := store.get(key(number))) is not None:
            value, size = expected[number]
            assert found.num_tokens == size
            assert (found.data == value).all()
        elif name == "delete":
            store.delete(key(number))
        elif name in ("pin", "unpin"):
            getattr(store, name)([key(number)])
        stats = store.stats()
        assert stats.bytes <= 3 * BYTES
        assert stats.chunks == sum(key(n) in store for n in range(7))


def test_threads_may_share_a_store() -> None:
    store = MemoryStore(max_bytes=5 * BYTES)

    def work(worker: int) -> None:
        for i in range(200):
            number = (worker + i) % 9
            store.put(key(number), kv(number))
            found = store.get(key(number))
            assert found is None or (found.data == number).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert store.stats().bytes <= 5 * BYTES
