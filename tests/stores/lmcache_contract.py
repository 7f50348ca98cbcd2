"""What must hold for every supported LMCache, run by `test_lmcache.py` in a process that imports that one version."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend_rag.errors import StoreError
from blend_rag.stores import KVStore, MissReason, open_store
from tests.stores.cases import is_kv, key, kv, wait_for
from tests.stores.redis_server import RedisServer

SECRET = "correct horse battery staple"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(params=["fs", "resp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "fs":
        return f"lmcache+fs://{tmp_path / 'objects'}?pause=0.05&part_bytes=10kB"
    server = request.getfixturevalue("server")
    return f"lmcache+resp://127.0.0.1:{server.port}?pause=0.05&part_bytes=10kB&num_workers=2"


@pytest.fixture
def store(url: str) -> Iterator[KVStore]:
    store = open_store([url], secret=SECRET)
    yield store
    store.close()


def test_version_is_the_one_under_test() -> None:
    from importlib.metadata import version

    assert version("lmcache") == os.environ["LMCACHE_UNDER_TEST"]


def test_put_get_contains_delete(store: KVStore, url: str) -> None:
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.NEVER_WARMED
    store.put(key(1), kv(1.5, tokens=400))  # six parts
    assert key(1) in store
    reader = open_store([url], secret=SECRET)
    assert is_kv(reader.get(key(1)), 1.5, 400)
    reader.close()
    store.put(key(1), kv(2.5, tokens=300))
    assert is_kv(store.get(key(1)), 2.5, 300)
    assert store.delete(key(1))
    assert store.get(key(1)) is None
    assert store.stats().damaged == 0


def test_namespaces_and_secrets(store: KVStore, url: str) -> None:
    store.put(key(1, namespace="a"), kv(1))
    assert store.get(key(1, namespace="b")) is None
    stranger = open_store([url], secret="another deployment's secret")
    assert stranger.get(key(1, namespace="a")) is None
    stranger.close()
    assert is_kv(store.get(key(1, namespace="a")), 1)


def test_many_in_a_row(store: KVStore) -> None:
    for number in range(30):
        store.put(key(number), kv(number))
    assert all(is_kv(store.get(key(number)), number) for number in range(30))


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    store = open_store([f"lmcache+fs://{tmp_path / 'objects'}"], secret=SECRET)
    store.put(key(1), kv(1))
    whole = {path: path.read_bytes() for path in (tmp_path / "objects").rglob("*") if path.is_file()}
    assert len(whole) == 2
    for path, content in whole.items():
        flipped = bytearray(content)
        flipped[20] ^= 4
        path.write_bytes(flipped)
        assert store.get(key(1)) is None
        assert store.why_missing(key(1)) in (MissReason.TORN, MissReason.FORGED)
        path.write_bytes(content[:-1])
        assert store.get(key(1)) is None
        assert store.why_missing(key(1)) is MissReason.TORN
        path.write_bytes(content)
        assert is_kv(store.get(key(1)), 1)
    assert store.stats().damaged == 4
    store.close()


def test_a_damaged_value_does_not_break_what_follows(server: RedisServer) -> None:
    import redis

    store = open_store([f"lmcache+resp://127.0.0.1:{server.port}?pause=0.05"], secret=SECRET)
    for number in (1, 2):
        store.put(key(number), kv(number))
    client = redis.Redis(port=server.port)
    header = min(client.scan_iter("*"), key=client.strlen)
    for name in client.scan_iter("*"):
        if client.strlen(name) == client.strlen(header):
            client.set(name, client.get(name)[:-5])
            break
    found = [store.get(key(number)) for number in (1, 2)]
    assert sum(kv_found is None for kv_found in found) == 1
    wait_for(lambda: sum(store.get(key(number)) is not None for number in (1, 2)) == 1)
    store.close()


def test_a_server_that_hangs_or_dies_costs_time_only(server: RedisServer) -> None:
    store = open_store(
        [f"lmcache+resp://127.0.0.1:{server.port}?pause=0.05&deadline=0.5&put_deadline=2"], secret=SECRET
    )
    store.put(key(1), kv(1))
    os.kill(server.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert store.get(key(1)) is None
    assert time.monotonic() - started < 3
    assert store.why_missing(key(1)) is MissReason.TOO_SLOW
    os.kill(server.process.pid, signal.SIGCONT)
    wait_for(lambda: is_kv(store.get(key(1)), 1))
    server.kill()
    assert store.get(key(1)) is None
    with pytest.raises(StoreError):
        store.put(key(2), kv(2))
    server.start()

    def comes_back() -> bool:
        try:
            store.put(key(3), kv(3))
        except StoreError:
            return False
        return is_kv(store.get(key(3)), 3)

    wait_for(comes_back, seconds=20)
    store.close()


def test_what_it_cannot_do_is_said(store: KVStore) -> None:
    for work in (store.purge, store.verify):
        with pytest.raises(StoreError, match="cannot list what it holds"):
            work()
    assert store.stats().chunks is None
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(["lmcache+no-such-kind://"], secret=SECRET)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(["lmcache+resp://127.0.0.1:6379?num_workers=-1"], secret=SECRET)
