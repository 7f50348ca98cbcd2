"""Stores by URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend_rag.errors import StoreError
from blend_rag.stores import DiskStore, MemoryStore, TieredStore, open_store
from blend_rag.stores.shared import SharedStore
from blend_rag.stores.url import parse_bytes
from tests.stores.cases import is_kv, key, kv

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BLEND_RAG_STORE_SECRET", raising=False)
    monkeypatch.delenv("BLEND_RAG_STORE_SECRET_FILE", raising=False)
    monkeypatch.setenv("BLEND_RAG_CACHE", str(tmp_path / "cache"))


def test_memory() -> None:
    store = open_store("memory://?max_bytes=2MiB")
    assert isinstance(store, MemoryStore)
    assert store.stats().max_bytes == 2 << 20


def test_a_folder_gets_memory_in_front(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/my%20kv?max_bytes=1.5GB")
    assert isinstance(store, TieredStore)
    memory, disk = store.tiers
    assert isinstance(memory, MemoryStore)
    assert isinstance(disk, DiskStore)
    assert disk.folder == tmp_path / "my kv"
    assert disk.stats().max_bytes == 1_500_000_000
    store.put(key(1), kv(1))
    store.close()
    assert is_kv(open_store([f"file://{tmp_path}/my%20kv"]).get(key(1)), 1)


def test_a_shared_tier_gets_memory_and_a_disk_cache_in_front(tmp_path: Path) -> None:
    store = open_store("redis://127.0.0.1:1/0", secret=SECRET)
    assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore, SharedStore]
    assert store.tiers[1].folder == tmp_path / "cache" / "kv"
    alone = open_store(["redis://127.0.0.1:1/0"], secret=SECRET)
    assert isinstance(alone, SharedStore)
    with pytest.raises(StoreError, match="secret"):
        open_store("redis://127.0.0.1:1/0")


def test_the_secret_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    monkeypatch.setenv("BLEND_RAG_STORE_SECRET_FILE", str(tmp_path / "secret"))
    from_file = open_store(["redis://127.0.0.1:1/0"])
    monkeypatch.setenv("BLEND_RAG_STORE_SECRET", SECRET)
    from_variable = open_store(["redis://127.0.0.1:1/0"])
    given = open_store(["redis://127.0.0.1:1/0"], secret=SECRET)
    names = {store._sealer.name(key(1)) for store in (from_file, from_variable, given)}
    assert len(names) == 1
    monkeypatch.delenv("BLEND_RAG_STORE_SECRET")
    monkeypatch.setenv("BLEND_RAG_STORE_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(["redis://127.0.0.1:1/0"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere", "no store URL"),
        ("/some/folder", "no store URL"),
        ("redis://:hunter2@host:port/0", "no store URL"),
        ("ftp://host/folder", "ftp:// is no kind of store"),
        ("file://host/folder", "absolute folder"),
        ("file://", "absolute folder"),
        ("memory://?max_bytes=lots", "'lots' is no size"),
        ("memory://?max_byte=5", "no setting max_byte"),
        ("redis://localhost?deadline=-1", "'-1' is no time"),
        ("redis://localhost?ttl=soon", "'soon' is no time"),
        ("redis://:hunter2@localhost/zero?no_such_option=1", "no_such_option"),
    ],
)
def test_bad_urls_are_said_without_their_passwords(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        open_store([url], secret=SECRET)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__!r}"


def test_a_tier_that_cannot_be_opened_closes_those_before_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        open_store([f"file://{tmp_path}/kv", "ftp://host"])
    assert not list((tmp_path / "kv" / "unfinished").iterdir())


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("20GiB", 20 << 30), ("1.5 MB", 1_500_000), ("3kb", 3000), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4", "GiB", "4XB", "nan", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(StoreError, match="is no size"):
        parse_bytes(text)
