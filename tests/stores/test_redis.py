"""Redis as a shared tier, on a real redis-server."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from blend_rag.errors import StoreError
from blend_rag.stores import KVStore, MissReason, open_store
from tests.stores.cases import OPERATIONS, is_kv, key, kv, run_operations, wait_for
from tests.stores.redis_server import PROGRAM, RedisServer, free_port

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")
SECRET = "correct horse battery staple"
QUICK = {"pause": 0.05, "deadline": 2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def connect(server: RedisServer, secret: str = SECRET, user: str = "", **options: object) -> KVStore:
    return open_store([server.url(user, **{**QUICK, **options})], secret=secret)


def client(server: RedisServer):
    import redis

    return redis.Redis(port=server.port)


def test_what_one_puts_another_gets_bit_by_bit(server: RedisServer) -> None:
    connect(server).put(key(1), kv(1.25, tokens=100))
    assert is_kv(connect(server).get(key(1)), 1.25, 100)


def test_values_are_split(server: RedisServer) -> None:
    store = connect(server, part_bytes="10kB")
    store.put(key(1), kv(7, tokens=400))
    values = [client(server).strlen(name) for name in client(server).scan_iter("*") if name.count(b".") == 3]
    assert sorted(values) == [1200, *[10_000] * 5]
    assert is_kv(store.get(key(1)), 7, 400)


def test_without_a_secret_it_does_not_open(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLEND_RAG_STORE_SECRET", raising=False)
    with pytest.raises(StoreError, match="allow_unsigned"):
        open_store([server.url()])
    monkeypatch.setenv("BLEND_RAG_STORE_SECRET", SECRET)
    open_store([server.url()]).put(key(1), kv(1))
    assert is_kv(connect(server).get(key(1)), 1)


def test_a_wrong_password_is_said_and_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, "--requirepass", "sesame-open")
    try:
        with caplog.at_level(logging.DEBUG):
            for user in (":hunter2secret@", ""):
                with pytest.raises(StoreError, match="check user and password") as caught:
                    connect(server, user=user)
                assert "hunter2secret" not in f"{caught.value!r} {caught.value.__cause__}"
            store = connect(server, user=":sesame-open@")
            store.put(key(1), kv(1))
            assert is_kv(store.get(key(1)), 1)
            server.kill()
            assert store.get(key(1)) is None
            with pytest.raises(StoreError) as caught:
                store.put(key(2), kv(2))
        assert "sesame-open" not in f"{caplog.text} {store!r} {store.stats()} {caught.value}"
        assert "hunter2secret" not in caplog.text
    finally:
        server.kill()


def test_tls(tmp_path: Path) -> None:
    certificate, private, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", private, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    tls = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", private]
    server = RedisServer(tmp_path, *map(str, tls), "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no")
    try:
        store = open_store([f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"], secret=SECRET)
        store.put(key(1), kv(1))
        assert is_kv(store.get(key(1)), 1)
        stranger = open_store([f"rediss://localhost:{port}/0?pause=0.05"], secret=SECRET)  # trusts no such certificate
        assert stranger.get(key(1)) is None
        assert stranger.why_missing(key(1)) is MissReason.UNREACHABLE
    finally:
        server.kill()


def test_objects_vanish_after_their_time(server: RedisServer) -> None:
    store = connect(server, ttl=1)
    store.put(key(1), kv(1))
    assert is_kv(store.get(key(1)), 1)
    assert all(0 < client(server).pttl(name) <= 1000 for name in client(server).scan_iter("*"))
    wait_for(lambda: store.get(key(1)) is None)
    assert store.why_missing(key(1)) in (MissReason.EVICTED, MissReason.NEVER_WARMED)


def test_eviction_is_a_miss(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    try:
        store = connect(server, part_bytes="100kB")
        for number in range(40):  # 256 kB each
            store.put(key(number), kv(number, tokens=2000))
        found = {number: store.get(key(number)) for number in range(40)}
        held = [number for number, kv_found in found.items() if kv_found is not None]
        assert 0 < len(held) < 40
        assert all(is_kv(found[number], number, 2000) for number in held)
        reasons = {store.why_missing(key(number)) for number in range(40) if number not in held}
        assert reasons <= {MissReason.EVICTED, MissReason.NEVER_WARMED}, "never a damaged object"
        assert MissReason.EVICTED in reasons
        assert store.stats().damaged == 0
    finally:
        server.kill()


def test_a_full_server_that_does_not_evict_refuses_and_still_serves(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        store = connect(server, pause=60)
        kept = 0
        refusal = ""
        while not refusal and kept < 40:
            try:
                store.put(key(kept), kv(kept, tokens=2000))
                kept += 1
            except StoreError as error:
                refusal = str(error)
        assert "refuses chunk KV" in refusal
        assert 0 < kept < 40
        assert all(is_kv(store.get(key(number)), number, 2000) for number in range(kept))
        assert store.get(key(kept)) is None
    finally:
        server.kill()


def test_another_namespace_sees_nothing(server: RedisServer) -> None:
    store = connect(server)
    store.put(key(1, namespace="a"), kv(1))
    other = key(1, namespace="b")
    assert other not in store
    assert store.get(other) is None
    assert store.why_missing(other) is MissReason.NEVER_WARMED
    assert store.stats("b").chunks == 0
    assert store.purge("b") == 0
    assert store.stats("a").chunks == 1
    assert store.purge("a") == 1
    assert client(server).dbsize() == 0


def test_purge_and_verify(server: RedisServer) -> None:
    store = connect(server)
    for number in range(5):
        store.put(key(number), kv(number))
    part = next(name for name in client(server).scan_iter("*") if name.count(b".") == 3)
    content = bytearray(client(server).get(part))
    content[50] ^= 1
    client(server).set(part, bytes(content))
    report = store.verify()
    assert report.checked == 5
    assert report.damaged == (part.decode().split(".")[1],)
    assert store.purge() == 5
    assert client(server).dbsize() == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(OPERATIONS)
def test_a_key_never_returns_other_kv(server: RedisServer, operations) -> None:
    client(server).flushall()
    store = connect(server, part_bytes=1000)
    run_operations(store, operations, lambda store: None)
    store.close()


# Faults


def test_a_slow_server_costs_its_deadline_once(server: RedisServer) -> None:
    store = connect(server, deadline=0.3, pause=30)
    store.put(key(1), kv(1))
    os.kill(server.process.pid, signal.SIGSTOP)  # it accepts connections and answers none
    try:
        started = time.monotonic()
        assert [store.get(key(1)) for _ in range(5)] == [None] * 5
        assert time.monotonic() - started < 3
        assert store.why_missing(key(1)) is MissReason.TOO_SLOW
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_server_killed_in_the_middle_costs_time_only(server: RedisServer) -> None:
    random.seed(2)
    store = connect(server, pause=0.02, put_deadline=2)
    stop = threading.Event()

    def work(worker: int) -> tuple[int, int, int]:
        hits = misses = refused = 0
        while not stop.is_set():
            number = random.randrange(6)
            try:
                store.put(key(number), kv(number, tokens=20_000))  # 2.5 MB: kills hit transfers
            except StoreError:
                refused += 1
            found = store.get(key(number))
            assert found is None or is_kv(found, number, 20_000)
            hits, misses = hits + (found is not None), misses + (found is None)
        return hits, misses, refused

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, worker) for worker in range(2)]
        for _ in range(8):
            time.sleep(0.1 + random.random() * 0.1)
            server.kill()
            time.sleep(0.02)
            server.start()
        time.sleep(0.3)
        stop.set()
        results = [worker.result() for worker in workers]
    assert sum(hits for hits, _, _ in results) > 0
    assert sum(misses + refused for _, misses, refused in results) > 0
    assert store.stats().damaged == 0
    wait_for(lambda: comes_back(store))


def comes_back(store: KVStore) -> bool:
    try:
        store.put(key(9), kv(9))
    except StoreError:
        return False
    return is_kv(store.get(key(9)), 9)


def test_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.kill()
    store = connect(server)
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.UNREACHABLE
    server.start()
    try:
        wait_for(lambda: comes_back(store))
    finally:
        server.kill()
