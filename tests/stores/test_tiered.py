"""Several tiers as one store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from blend_rag.errors import StoreError
from blend_rag.stores import DiskStore, KVStore, MemoryStore, MissReason, TieredStore
from tests.stores.cases import BYTES, OPERATIONS, is_kv, key, kv, run_operations
from tests.stores.test_shared import Dictionary, fail, make


def make_tiers(folder: Path) -> tuple[TieredStore, Dictionary]:
    shared, transport = make()
    return TieredStore([MemoryStore(2 * BYTES), DiskStore(folder), shared]), transport


def test_put_writes_to_all_and_get_takes_the_first(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    store.put(key(1), kv(1))
    assert all(key(1) in tier for tier in store.tiers)
    transport.before = fail
    assert is_kv(store.get(key(1)), 1), "memory is asked first"
    assert store.stats().faults == 0


def test_what_is_found_behind_comes_to_the_front(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    memory, disk, shared = store.tiers
    shared.put(key(1), kv(1))
    assert is_kv(store.get(key(1)), 1)
    assert key(1) in memory
    store.flush()
    assert is_kv(disk.get(key(1)), 1)
    store.close()
    transport.objects.clear()
    assert is_kv(DiskStore(tmp_path).get(key(1)), 1)


def test_a_tier_that_fails_is_reported_and_the_others_keep(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    transport.before = fail
    with pytest.raises(StoreError, match=r"dictionary did not take .* \(kept in 2 of 3 tiers\)"):
        store.put(key(1), kv(1))
    assert is_kv(store.get(key(1)), 1)
    assert store.get(key(2)) is None
    assert store.why_missing(key(2)) is MissReason.UNREACHABLE


def test_memory_that_is_too_small_is_no_failure(tmp_path: Path) -> None:
    store, _ = make_tiers(tmp_path)
    store.put(key(1), kv(1, tokens=9))
    assert is_kv(store.get(key(1)), 1, 9)
    tiny = TieredStore([MemoryStore(2 * BYTES)])
    with pytest.raises(StoreError, match="raise max_bytes"):
        tiny.put(key(1), kv(1, tokens=9))
    with pytest.raises(StoreError, match="at least one tier"):
        TieredStore([])


def test_linking_fills_a_lasting_tier_that_lacks_the_chunk(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    store.put(key(1), kv(1))
    transport.objects.clear()
    assert key(1) in store
    store.link(key(1), ["a"])
    assert is_kv(store.tiers[2].get(key(1)), 1)
    assert store.keys_of("a") == (key(1),)


def test_deleting_a_document_reaches_every_tier_or_keeps_the_document(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    store.put(key(1), kv(1), ["a"])
    store.put(key(2), kv(2), ["a", "b"])
    transport.before = fail
    with pytest.raises(StoreError, match="did not delete"):
        store.delete_document("a")
    assert store.keys_of("a") == (key(1),), "try again"
    transport.before = lambda operation: None
    store.tiers[2]._paused_until = 0
    assert store.delete_document("a") == 1
    assert not any(key(1) in tier for tier in store.tiers)
    assert all(key(2) in tier for tier in store.tiers)


def test_the_most_telling_reason_is_given(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    store.put(key(1), kv(1))
    assert store.why_missing(key(9)) is MissReason.NEVER_WARMED
    assert store.why_missing(key(1, context_ids=(3,))) is MissReason.OTHER_PREFIX
    store.tiers[0].delete(key(1))
    store.tiers[1].delete(key(1))
    for name, content in transport.objects.items():
        transport.objects[name] = content[:-1] + bytes([content[-1] ^ 1])
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) in (MissReason.TORN, MissReason.FORGED)
    assert store.stats().damaged == 1


def test_purge_and_verify_reach_every_tier(tmp_path: Path) -> None:
    store, transport = make_tiers(tmp_path)
    store.put(key(1), kv(1))
    store.put(key(2, namespace="b"), kv(2))
    assert store.verify().checked == 4
    assert store.purge("b") == 1
    assert is_kv(store.get(key(1)), 1)
    assert store.purge() == 1
    assert not transport.objects
    assert store.get(key(1)) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(OPERATIONS)
def test_a_key_never_returns_other_kv(tmp_path: Path, operations) -> None:
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    store, _ = make_tiers(tmp_path / "kv")

    def check(store: KVStore) -> None:
        assert store.stats().tiers[0].bytes <= 2 * BYTES

    run_operations(store, operations, check)
    store.close()
