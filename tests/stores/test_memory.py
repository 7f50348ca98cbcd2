"""The memory store: bounded, least recently used first, pins hold, misses have reasons."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given

from blend_rag.errors import StoreError
from blend_rag.stores import KVStore, MemoryStore, MissReason
from tests.stores.cases import BYTES, OPERATIONS, key, kv, run_operations


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


@given(OPERATIONS)
def test_bound_holds_and_a_key_never_returns_other_kv(operations) -> None:
    def check(store: KVStore) -> None:
        stats = store.stats()
        assert stats.bytes <= 3 * BYTES
        assert stats.chunks == sum(key(n) in store for n in range(7))

    run_operations(MemoryStore(max_bytes=3 * BYTES), operations, check)


def test_a_document_takes_with_it_what_no_other_uses() -> None:
    store = MemoryStore()
    store.put(key(1), kv(1), ["a"])
    store.put(key(2), kv(2), ["a", "b"])
    store.put(key(3), kv(3))
    assert store.keys_of("a") == (key(1),)
    assert store.delete_document("a", "tenant") == 0, "another namespace's document"
    assert store.delete_document("a") == 1
    assert key(1) not in store
    assert key(2) in store
    assert store.delete_document("b") == 1
    assert key(3) in store


def test_namespaces_do_not_see_each_others_numbers() -> None:
    store = MemoryStore()
    store.put(key(1, namespace="a"), kv(1))
    store.get(key(1, namespace="a"))
    store.get(key(2, namespace="a"))
    mine, theirs = store.stats("a"), store.stats("b")
    assert (mine.chunks, mine.hits, mine.misses) == (1, 1, 1)
    assert (theirs.chunks, theirs.bytes, theirs.hits, theirs.misses) == (0, 0, 0, 0)
    assert store.purge("b") == 0
    assert store.purge("a") == 1


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
