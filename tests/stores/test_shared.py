"""Shared tiers are not trusted, and what they do wrong costs time only. The transport here is a dictionary."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given

from blend_rag.errors import StoreError
from blend_rag.stores import KVStore, MissReason
from blend_rag.stores.envelope import HEADER_BYTES, RejectedError, Sealer, Secret
from blend_rag.stores.shared import SharedStore
from tests.stores.cases import OPERATIONS, is_kv, key, kv, run_operations, wait_for

SECRET = "correct horse battery staple"


class Dictionary:
    """Objects in a dictionary that tests reach into; `before` runs before every operation."""

    tier = "dictionary"
    max_part_bytes = 100

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.sets: dict[str, set[str]] = {}
        self.before: Callable[[str], None] = lambda operation: None
        self.interrupted = threading.Event()

    def read(self, name: str, size: int) -> np.ndarray | None:
        self.before("read")
        content = self.objects.get(name)
        if content is not None and len(content) != size:
            raise RejectedError("size")
        return None if content is None else np.frombuffer(content, np.uint8).copy()

    def write(self, name: str, content: bytes | memoryview) -> None:
        self.before("write")
        self.objects[name] = bytes(content)

    def exists(self, name: str) -> bool:
        self.before("exists")
        return name in self.objects

    def remove(self, names: Sequence[str]) -> None:
        self.before("remove")
        for name in names:
            self.objects.pop(name, None)

    def names(self, prefix: str) -> Iterator[str]:
        return iter([name for name in [*self.objects, *self.sets] if name.startswith(prefix)])

    def note(self, name: str, member: str) -> None:
        self.sets.setdefault(name, set()).add(member)

    def noted(self, name: str) -> list[str]:
        return list(self.sets.get(name, ()))

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None: ...


def make(
    transport: Dictionary | None = None, secret: str | None = SECRET, **waits: float
) -> tuple[SharedStore, Dictionary]:
    transport = transport or Dictionary()
    sealer = Sealer(Secret(secret) if secret else None, allow_unsigned=secret is None)
    return SharedStore(transport, sealer, **{"pause_s": 0.05, **waits}), transport


def header_of(transport: Dictionary) -> str:
    [name] = [name for name in transport.objects if name.count(".") == 1]
    return name


def test_chunks_are_split_and_put_together_again() -> None:
    store, transport = make()
    store.put(key(1), kv(3, tokens=7))
    assert len(transport.objects) == 1 + -(-kv(0, 7).nbytes // 100)
    assert is_kv(store.get(key(1)), 3, 7)


@given(OPERATIONS)
def test_a_key_never_returns_other_kv(operations) -> None:
    store, transport = make()

    def check(store: KVStore) -> None:
        headers = [name for name in transport.objects if name.count(".") == 1]
        assert store.stats().chunks == len(headers)
        parts = {name.rsplit(".", 2)[0] for name in transport.objects if name.count(".") == 3}
        assert parts == set(headers), "no part without its header"

    run_operations(store, operations, check)


# Integrity


def test_without_a_secret_it_opens_only_when_told_so() -> None:
    with pytest.raises(StoreError, match="BLEND_RAG_STORE_SECRET"):
        Sealer(None)
    with pytest.raises(StoreError, match="16 random bytes"):
        Secret("short")
    store, _ = make(secret=None)
    store.put(key(1), kv(1))
    assert is_kv(store.get(key(1)), 1)


def test_every_bit_of_every_object_counts() -> None:
    store, transport = make()
    store.put(key(1), kv(1, tokens=1))
    rng = np.random.default_rng(5)
    rejected = 0
    for name, content in list(transport.objects.items()):
        everywhere = range(len(content)) if len(content) < HEADER_BYTES else [*range(320), *rng.integers(0, 4096, 80)]
        for at in everywhere:
            flipped = bytearray(content)
            flipped[at] ^= 1 << int(rng.integers(8))
            transport.objects[name] = bytes(flipped)
            assert store.get(key(1)) is None, f"{name} byte {at}"
            assert store.why_missing(key(1)) in (MissReason.TORN, MissReason.FORGED)
            rejected += 1
        transport.objects[name] = content
    assert is_kv(store.get(key(1)), 1, tokens=1)
    assert store.stats().damaged == rejected


@pytest.mark.parametrize("secret", [None, "another deployment's secret"])
def test_a_right_checksum_without_the_right_signature_is_rejected(secret: str | None) -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    forger, theirs = make(secret=secret)
    forger.put(key(1), kv(666))
    assert is_kv(forger.get(key(1)), 666), "right by the forger's own measure"
    mine, forged = header_of(transport), header_of(theirs)
    for name, content in theirs.objects.items():
        transport.objects[name.replace(forged, mine)] = content
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.FORGED
    assert store.stats().damaged == 1
    assert store.verify().damaged == (key(1).digest,)
    store.put(key(1), kv(1))  # computed again
    assert is_kv(store.get(key(1)), 1)


def test_signed_objects_are_not_read_without_the_secret() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    reader, _ = make(transport, secret=None)
    assert reader.get(key(1)) is None
    name = reader._sealer.name(key(1))
    for old, content in list(transport.objects.items()):
        transport.objects[old.replace(header_of(transport), name) if old.count(".") == 3 else name] = content
    assert reader.get(key(1)) is None
    assert reader.why_missing(key(1)) is MissReason.FORGED


def test_a_valid_object_moved_to_another_key_is_rejected() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    here, there = header_of(transport), store._sealer.name(key(2))
    for name, content in list(transport.objects.items()):
        transport.objects[name.replace(here, there)] = content
    assert store.get(key(2)) is None
    assert store.why_missing(key(2)) is MissReason.FORGED
    assert store.verify().damaged == (key(2).digest,)
    assert is_kv(store.get(key(1)), 1)


def test_an_object_of_another_namespace_is_rejected_even_under_its_name() -> None:
    store, transport = make()
    store.put(key(1, namespace="a"), kv(1))
    here, there = header_of(transport), store._sealer.name(key(1, namespace="b"))
    for name, content in list(transport.objects.items()):
        transport.objects[name.replace(here, there)] = content
    assert store.get(key(1, namespace="b")) is None
    assert is_kv(store.get(key(1, namespace="a")), 1)


def test_parts_of_two_writers_never_mix() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    older = dict(transport.objects)
    store.put(key(1), kv(2))
    transport.objects.update({name: content for name, content in older.items() if name.count(".") == 3})
    assert is_kv(store.get(key(1)), 2)


def test_half_an_object_is_a_miss() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    last_part = max(name for name in transport.objects if name.count(".") == 3)
    del transport.objects[last_part]
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.EVICTED
    assert key(1) not in store


def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(SECRET)
    assert SECRET not in f"{secret!r} {secret} {vars(Secret)}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with caplog.at_level(logging.DEBUG):
        store, transport = make()
        store.put(key(1), kv(1))
        transport.objects.clear()
        store.get(key(1))
        transport.before = fail
        store.get(key(1))
    assert SECRET not in f"{caplog.text} {store!r} {store.stats()}"


# Namespaces


def test_namespaces_never_meet() -> None:
    store, transport = make()
    store.put(key(1, namespace="a"), kv(1))
    store.get(key(1, namespace="a"))
    assert store.get(key(1, namespace="b")) is None
    assert store.why_missing(key(1, namespace="b")) is MissReason.NEVER_WARMED
    theirs = store.stats("b")
    assert (theirs.chunks, theirs.hits, theirs.damaged) == (0, 0, 0)
    assert store.verify("b").checked == 0
    assert store.purge("b") == 0
    assert is_kv(store.get(key(1, namespace="a")), 1)
    assert store.purge("a") == 1
    assert not transport.objects


def test_names_cannot_be_guessed_without_the_secret() -> None:
    signed, unsigned = Sealer(Secret(SECRET)), Sealer(None, allow_unsigned=True)
    assert signed.name(key(1)) != unsigned.name(key(1))
    assert signed.prefix("a") != signed.prefix("b")


# Faults


def fail(operation: str) -> None:
    raise ConnectionResetError("gone")


def test_misses_name_their_reason() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    assert store.why_missing(key(2)) is MissReason.NEVER_WARMED
    assert store.why_missing(key(1, context_ids=(9,))) is MissReason.OTHER_PREFIX
    assert store.why_missing(key(1, fingerprint="other")) is MissReason.OTHER_MODEL
    transport.objects.clear()
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.EVICTED


def test_a_tier_that_is_gone_is_a_miss_and_comes_back() -> None:
    store, transport = make()
    store.put(key(1), kv(1))
    transport.before = fail
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.UNREACHABLE
    assert key(1) not in store
    with pytest.raises(StoreError, match="did not take chunk KV"):
        store.put(key(2), kv(2))
    assert store.stats().faults == 2
    transport.before = lambda operation: None
    wait_for(lambda: store.get(key(1)) is not None)


def test_a_slow_tier_costs_its_deadline_once() -> None:
    store, transport = make(deadline_s=0.2, pause_s=30)
    store.put(key(1), kv(1))
    asked = []

    def hang(operation: str) -> None:
        asked.append(operation)
        transport.interrupted.wait(20)

    transport.before = hang
    started = time.monotonic()
    assert [store.get(key(number)) for number in (1, 2, 3, 4)] == [None] * 4
    assert time.monotonic() - started < 2, "four gets, one deadline"
    assert asked == ["read"]
    assert transport.interrupted.is_set()
    assert {store.why_missing(key(number)) for number in (1, 2, 3, 4)} == {MissReason.TOO_SLOW}


def test_a_tier_that_refuses_is_not_left_alone() -> None:
    store, transport = make(pause_s=30)
    store.put(key(1), kv(1))

    def full(operation: str) -> None:
        if operation == "write":
            raise StoreError("out of memory")

    transport.before = full
    with pytest.raises(StoreError, match="out of memory"):
        store.put(key(2), kv(2))
    assert is_kv(store.get(key(1)), 1)
