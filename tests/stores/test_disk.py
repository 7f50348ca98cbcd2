"""The disk store: lasts, is shared by processes, stays within its bound, and never returns other bytes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from blend_rag.errors import StoreError
from blend_rag.stores import DiskStore, KVStore, MissReason, disk
from tests.stores.cases import OPERATIONS, is_kv, key, kv, run_operations
from tests.stores.writers import write_and_read, write_some, write_until_killed

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.stores.writers"])


def files(store: DiskStore) -> list[Path]:
    return sorted((store.folder / "objects").glob("*/*"))


def unfinished(folder: Path) -> list[Path]:
    return list((folder / "unfinished").glob("*/*"))


def file_bytes(tokens: int = 4) -> int:
    """Size of a chunk file; documents make it a little larger."""
    from safetensors.torch import save

    return len(save({"kv": kv(0, tokens).data}, disk._metadata(key(0), [])))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "kv")
    yield store
    store.close()


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    first = DiskStore(tmp_path)
    first.put(key(1), kv(1.5), ["report.md"])
    first.close()
    second = DiskStore(tmp_path)
    assert is_kv(second.get(key(1)), 1.5)
    assert second.keys_of("report.md") == (key(1),)
    assert second.stats().hits == 1


def test_another_process_reads_it(store: DiskStore) -> None:
    writer = PROCESSES.Process(target=write_some, args=(store.folder, [1, 2, 3]))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert all(is_kv(store.get(key(number)), number) for number in (1, 2, 3))


def test_only_the_owner_can_read_it(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    for path in [store.folder, *store.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    mode = tmp_path.stat().st_mode
    with pytest.raises(StoreError, match="choose a new or an empty folder"):
        DiskStore(tmp_path)
    assert tmp_path.stat().st_mode == mode
    with pytest.raises(StoreError, match="cannot be used"):
        DiskStore(tmp_path / "letter.txt" / "kv")
    with pytest.raises(StoreError, match="positive"):
        DiskStore(tmp_path / "new", max_bytes=0)


def test_reads_are_mapped_and_survive_eviction(store: DiskStore) -> None:
    store.put(key(1), kv(1, tokens=2000))
    found = store.get(key(1))
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert files(store)[0].name in maps.read_text()
    store.delete(key(1))
    assert is_kv(found, 1, 2000)


def test_least_recently_used_goes_first_and_says_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=2 * file_bytes() + 20)
    store.put(key(1), kv(1))
    store.put(key(2), kv(2))
    store.get(key(1))
    store.put(key(3), kv(3))
    assert key(1) in store
    assert store.get(key(2)) is None
    assert store.why_missing(key(2)) is MissReason.EVICTED
    assert store.stats().evictions == 1
    assert store.stats().bytes == sum(path.stat().st_size for path in files(store))
    store.close()
    assert DiskStore(tmp_path).why_missing(key(2)) is MissReason.EVICTED, "also after a restart"


def test_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=2 * file_bytes() + 20)
    store.put(key(1), kv(1))
    store.put(key(2), kv(2))
    store.get(key(1))
    store.close()
    store = DiskStore(tmp_path, max_bytes=2 * file_bytes() + 20)
    store.put(key(3), kv(3))
    assert key(1) in store
    assert key(2) not in store


def test_pinned_chunks_stay_over_restarts(tmp_path: Path) -> None:
    bound = 2 * file_bytes() + 20
    store = DiskStore(tmp_path, bound)
    store.pin([key(1)])
    store.put(key(1), kv(1))
    store.close()
    store = DiskStore(tmp_path, bound)
    for number in (2, 3, 4):
        store.put(key(number), kv(number))
    assert is_kv(store.get(key(1)), 1)
    with pytest.raises(StoreError, match="unpin"):
        store.put(key(5), kv(5, tokens=8))
    assert key(4) in store, "a refusal evicts nothing"
    store.unpin([key(1)])
    store.put(key(6), kv(6))
    store.put(key(7), kv(7))
    assert key(1) not in store


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=file_bytes() + 20)
    store.put(key(1), kv(1))
    with pytest.raises(StoreError, match="raise max_bytes"):
        store.put(key(2), kv(2, tokens=50))
    assert is_kv(store.get(key(1)), 1)


def test_misses_name_their_reason(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    assert store.why_missing(key(2)) is MissReason.NEVER_WARMED
    assert store.why_missing(key(1, context_ids=(9,))) is MissReason.OTHER_PREFIX
    assert store.why_missing(key(1, fingerprint="other")) is MissReason.OTHER_MODEL
    assert store.why_missing(key(1, dtype="float16")) is MissReason.OTHER_DTYPE
    assert store.why_missing(key(1, namespace="tenant")) is MissReason.NEVER_WARMED, "another tenant learns nothing"


def test_tombstones_are_bounded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=file_bytes() + 20, max_tombstones=5)
    for number in range(20):
        store.put(key(number), kv(number))
    evicted = [number for number in range(20) if store.why_missing(key(number)) is MissReason.EVICTED]
    assert evicted == [14, 15, 16, 17, 18]


def test_a_document_takes_with_it_what_no_other_uses(store: DiskStore) -> None:
    store.put(key(1), kv(1), ["a"])
    store.put(key(2), kv(2), ["a", "b"])
    store.put(key(3), kv(3))
    store.put(key(4, namespace="tenant"), kv(4), ["a"])
    assert store.delete_document("a") == 1
    assert [number for number in (1, 2, 3) if key(number) in store] == [2, 3]
    assert key(4, namespace="tenant") in store
    store.link(key(3), ["b"])
    assert store.delete_document("b") == 2
    assert len(files(store)) == 1


def test_namespaces_do_not_see_each_others_numbers(store: DiskStore) -> None:
    store.put(key(1, namespace="a"), kv(1))
    store.get(key(1, namespace="a"))
    store.get(key(2, namespace="a"))
    theirs = store.stats("b")
    assert (store.stats("a").chunks, store.stats("a").hits, store.stats("a").misses) == (1, 1, 1)
    assert (theirs.chunks, theirs.bytes, theirs.hits, theirs.misses) == (0, 0, 0, 0)
    assert store.verify("b").checked == 0
    assert store.purge("b") == 0
    assert store.purge("a") == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(OPERATIONS)
def test_bound_holds_and_a_key_never_returns_other_kv(tmp_path: Path, operations) -> None:
    folder = tmp_path / "kv"
    shutil.rmtree(folder, ignore_errors=True)
    bound = 3 * file_bytes(6)
    store = DiskStore(folder, bound)

    def check(store: KVStore) -> None:
        stats = store.stats()
        assert stats.bytes == sum(path.stat().st_size for path in files(store)) <= bound
        assert stats.chunks == sum(key(n) in store for n in range(7))

    run_operations(store, operations, check)
    assert store.verify().damaged == ()
    store.close()


# Damage


def damaged_is_rejected(store: DiskStore, number: int = 1) -> None:
    assert store.get(key(number)) is None
    assert store.why_missing(key(number)) is MissReason.TORN
    assert store.stats().damaged == 1
    store.put(key(number), kv(number))  # computed again
    assert is_kv(store.get(key(number)), number)


@pytest.mark.parametrize("where", ["length", "header", "padding", "payload", "last byte"])
def test_a_flipped_bit_is_rejected(store: DiskStore, where: str) -> None:
    store.put(key(1), kv(1))
    [path] = files(store)
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    padding = content[: 8 + header].rfind(b"}") + 1
    at = {"length": 0, "header": 30, "padding": padding, "payload": 8 + header + 5, "last byte": -1}[where]
    if where == "padding" and padding == 8 + header:
        pytest.skip("this header has no padding")
    content[at] ^= 0x40
    path.write_bytes(content)
    damaged_is_rejected(store)


def test_every_bit_of_a_small_file_counts(store: DiskStore) -> None:
    store.put(key(1), kv(1, tokens=1))
    [path] = files(store)
    content = path.read_bytes()
    random.seed(3)
    for at in [*range(16), *random.sample(range(len(content)), 150)]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        assert store.get(key(1)) is None, f"byte {at}"
        store.put(key(1), kv(1, tokens=1))
        [path] = files(store)


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_file_is_rejected(store: DiskStore, left: int) -> None:
    store.put(key(1), kv(1))
    [path] = files(store)
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    damaged_is_rejected(store)


def test_appended_bytes_are_rejected(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    with files(store)[0].open("ab") as file:
        file.write(b"more")
    damaged_is_rejected(store)


def test_swapped_files_are_rejected(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    [one] = files(store)
    store.put(key(2), kv(2))
    [two] = [path for path in files(store) if path != one]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert store.get(key(1)) is None
    assert store.get(key(2)) is None
    assert store.stats().damaged == 2


def test_a_valid_file_moved_to_another_key_is_rejected(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    store.put(key(2), kv(2))
    one, two = (store._index.file_of(key(number).digest) for number in (1, 2))
    checksum = two.partition("-")[2]
    moved = f"{key(1).digest}-{checksum}"  # right checksum, other key
    store._path(one).write_bytes(store._path(two).read_bytes())
    store._path(one).rename(store._path(moved))
    with store._index.writing():
        store._index._connection.execute("UPDATE chunks SET file = ? WHERE digest = ?", (moved, key(1).digest))
    damaged_is_rejected(store)


def test_a_vanished_file_is_a_miss(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    files(store)[0].unlink()
    assert key(1) not in store
    damaged_is_rejected(store)


def test_verify_finds_and_drops_what_is_damaged(store: DiskStore) -> None:
    for number in range(5):
        store.put(key(number), kv(number))
    path = store._path(store._index.file_of(key(3).digest))
    os.truncate(path, 100)
    report = store.verify()
    assert report.checked == 5
    assert report.damaged == (key(3).digest,)
    assert store.verify().checked == 4
    assert not path.exists()


def test_a_lost_index_is_built_from_the_files(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(key(1), kv(1), ["a"])
    store.put(key(2), kv(2))
    store.close()
    for path in tmp_path.glob("index.sqlite*"):
        path.write_bytes(b"this is no database, it only takes the name of one" * 100)
    store = DiskStore(tmp_path)
    assert is_kv(store.get(key(1)), 1)
    assert is_kv(store.get(key(2)), 2)
    assert store.keys_of("a") == (key(1),)


def test_files_nobody_knows_come_back_if_they_are_whole(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for number in (1, 2, 3):
        store.put(key(number), kv(number))
    with store._index.writing():
        store._index._connection.execute("DELETE FROM chunks WHERE digest <> ?", (key(3).digest,))
    os.truncate(store._path(next(path.name for path in files(store) if path.name.startswith(key(2).digest))), 40)
    store.close()
    store = DiskStore(tmp_path)
    assert is_kv(store.get(key(1)), 1), "its row was lost in a crash"
    assert store.get(key(2)) is None
    assert len(files(store)) == 2


# Processes and crashes


def test_nothing_acknowledged_is_lost_and_nothing_torn_is_read_after_kill_9(tmp_path: Path) -> None:
    random.seed(1)
    kills, start, during_write = 0, 0, 0
    acknowledged: list[int] = []
    while kills < 24:
        here, there = PROCESSES.Pipe(duplex=False)
        writer = PROCESSES.Process(target=write_until_killed, args=(tmp_path, start, 4000, there))
        writer.start()
        assert here.poll(30)
        time.sleep(random.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        there.close()
        while here.poll():
            try:
                acknowledged.append(here.recv())
            except EOFError:
                break
        kills += 1
        start = acknowledged[-1] + 10
        during_write += bool(unfinished(tmp_path))
        store = DiskStore(tmp_path)
        assert not unfinished(tmp_path)
        for number in acknowledged[-3:]:
            assert is_kv(store.get(key(number)), number, 4000)
        store.close()
    assert during_write >= 3, "some kills must have hit a write"
    store = DiskStore(tmp_path)
    report = store.verify()
    assert report.damaged == ()
    assert report.checked >= len(acknowledged) >= 24
    assert all(key(number) in store for number in acknowledged)


def test_processes_share_a_store_that_is_too_small_for_them(tmp_path: Path) -> None:
    bound = 6 * file_bytes()
    DiskStore(tmp_path, bound).close()
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
    workers = [
        PROCESSES.Process(target=write_and_read, args=(tmp_path, bound, seed, there))
        for seed, (_, there) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    results = [here.recv() for here, _ in pipes]
    for worker in workers:
        worker.join()
    assert [wrong for wrong, _ in results] == [0, 0]
    assert sum(hits for _, hits in results) > 0
    store = DiskStore(tmp_path, bound)
    assert store.verify().damaged == ()
    assert store.stats().bytes == sum(path.stat().st_size for path in files(store)) <= bound


def test_a_busy_index_costs_time_only(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(key(1), kv(1))

    def locked(digest: str) -> str:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(store._index, "file_of", locked)
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) is MissReason.FAILED
    assert key(1) not in store
    monkeypatch.undo()
    assert is_kv(store.get(key(1)), 1)
    assert store.stats().faults == 1


# A full disk


def test_a_full_disk_makes_room_or_says_so(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = DiskStore(small / "kv", max_bytes=1 << 30)
        for number in range(12):  # about 320 kB each
            store.put(key(number), kv(number, tokens=2500))
        held = [number for number in range(12) if is_kv(store.get(key(number)), number, 2500)]
        assert held == list(range(12 - len(held), 12))
        assert len(held) >= 3
        assert store.stats().evictions == 12 - len(held)
        store.pin(key(number) for number in held)
        with pytest.raises(StoreError, match="is full: free some space"):
            store.put(key(99), kv(99, tokens=12_000))
        assert all(is_kv(store.get(key(number)), number, 2500) for number in held)
        store.close()
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_disk_without_anything_to_evict_is_an_error(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: object, metadata: object) -> None:
        path.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "_write_flushed", write)
    with pytest.raises(StoreError, match="is full: free some space"):
        store.put(key(1), kv(1))
    assert store.get(key(1)) is None
    assert not unfinished(store.folder)


def test_a_folder_that_vanishes_is_a_miss_and_an_error(store: DiskStore) -> None:
    store.put(key(1), kv(1))
    shutil.rmtree(store.folder)
    assert store.get(key(1)) is None
    assert store.why_missing(key(1)) in (MissReason.TORN, MissReason.FAILED)
    with pytest.raises(StoreError, match="cannot be used"):
        store.put(key(2), kv(2))
