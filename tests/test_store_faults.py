"""Whatever a store does wrong costs time only: the answer stays right, the report says why, the engine goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blend_rag import (
    FULL_PREFILL,
    DiskStore,
    KVStore,
    MemoryStore,
    Passage,
    PromptBuilder,
    RecomputePolicy,
    TieredStore,
)
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.kv import ChunkKV
from blend_rag.stores import open_store
from tests.stores.redis_server import PROGRAM, RedisServer

FACTS = [
    "The capital of Freedonia is Fredville, a small town known for its blue cheese and its old mill.",
    "King Rufus the Third has ruled Freedonia since 1933. He rides a red bicycle to the palace every day.",
    "Trains in Freedonia are painted green and run at night only, because the days are far too hot.",
]
QUESTION = "What is the capital of Freedonia?"
SECRET = "correct horse battery staple"
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")


@pytest.fixture
def engine_on(engine: TransformersEngine) -> Callable[..., TransformersEngine]:
    """Engines on the session's model with a store of their own."""

    def make(store: KVStore, **options: object) -> TransformersEngine:
        options = {"self_test": False, "policy": RecomputePolicy(), **options}
        return TransformersEngine.from_loaded(engine.decoder.model, engine.tokenizer, store=store, **options)

    return make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def check_answer(engine: TransformersEngine, prompts: PromptBuilder, reason: str, wrong: int = 3) -> None:
    """`wrong` chunks are computed for that reason; the answer is that of a full prefill where all are."""
    layout = prompts.build(passages=FACTS, question=QUESTION)
    answer = engine.generate(layout, max_tokens=12)
    chunks = [segment for segment in answer.report.segments if segment.kind == "chunk"]
    assert answer.report.misses == {reason: wrong}
    assert sum(chunk.computed == chunk.tokens for chunk in chunks) == wrong
    if wrong == 3:
        assert answer.token_ids == engine.generate(layout, max_tokens=12, policy=FULL_PREFILL).token_ids
        assert answer.report.exact


def check_recovered(engine: TransformersEngine, prompts: PromptBuilder) -> None:
    engine.clear_hot()
    layout = prompts.build(passages=FACTS[::-1], question=QUESTION)
    report = engine.generate(layout, max_tokens=1).report
    assert report.misses == {}
    assert report.reused_tokens > 0


def objects(folder: Path) -> list[Path]:
    """Chunk files without the one of the prefix."""
    return sorted((folder / "objects").glob("*/*"), key=lambda path: path.stat().st_mtime)[1:]


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "remove"])
def test_damaged_files(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, tmp_path: Path, damage: str
) -> None:
    engine = engine_on(DiskStore(tmp_path / "kv"))
    engine.warm(prompts, FACTS)
    paths = objects(tmp_path / "kv")
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        if damage == "flip":
            content = bytearray(contents[number])
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "truncate":
            os.truncate(path, len(contents[number]) - 1)
        elif damage == "swap":
            path.write_bytes(contents[number - 1])
        else:
            path.unlink()
    engine.clear_hot()
    check_answer(engine, prompts, "torn file")
    assert engine.store.stats().damaged == 3
    check_recovered(engine, prompts)


def test_evicted_chunks_even_half_way(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, tmp_path: Path
) -> None:
    store = DiskStore(tmp_path / "kv")
    engine = engine_on(store)
    engine.warm(prompts, FACTS)
    kept = engine.key(prompts.chunk_ids(FACTS[1]), prompts.prefix_ids)
    store.pin([kept])
    held = store.stats().bytes
    store.close()
    engine = engine_on(DiskStore(tmp_path / "kv", max_bytes=held // 3), keep_new=False)
    check_answer(engine, prompts, "evicted", wrong=2)


def test_a_store_that_raises(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    engine = engine_on(store)
    engine.warm(prompts, FACTS)

    def fail(self: MemoryStore, *args: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as broken:
        for method in ("get", "put", "why_missing", "__contains__", "link"):
            broken.setattr(MemoryStore, method, fail)
        engine.clear_hot()
        check_answer(engine, prompts, "store failed")
        report = engine.warm(prompts, FACTS)
        assert report.computed == 3
        assert len(report.refused) == 4
        assert "out of order" in report.refused[0]
    check_recovered(engine, prompts)


def test_kv_of_another_shape(engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder) -> None:
    engine = engine_on(MemoryStore())
    engine.warm(prompts, FACTS)
    for fact in FACTS:
        key = engine.key(prompts.chunk_ids(fact), prompts.prefix_ids)
        engine.store.put(key, ChunkKV(torch.zeros(2, 2, 5, 1, 8)))
    engine.clear_hot()
    check_answer(engine, prompts, "other shape")
    for fact in FACTS:
        engine.store.delete(engine.key(prompts.chunk_ids(fact), prompts.prefix_ids))
    engine.warm(prompts, FACTS)
    check_recovered(engine, prompts)


@needs_redis
def test_forged_objects(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, server: RedisServer
) -> None:
    import redis

    mine = open_store([server.url()], secret=SECRET)
    engine = engine_on(mine)
    engine.warm(prompts, FACTS)
    forger = open_store([server.url()], allow_unsigned=True)
    client = redis.Redis(port=server.port, decode_responses=False)
    for fact in FACTS:  # right format, right checksum, under the right name, but not signed
        key = engine.key(prompts.chunk_ids(fact), prompts.prefix_ids)
        kv = mine.get(key)
        forger.put(key, ChunkKV(torch.zeros_like(kv.data)))
        theirs, name = (f"blend-rag:{store._sealer.name(key)}" for store in (forger, mine))
        for forged in client.scan_iter(f"{theirs}*"):
            client.copy(forged, forged.decode().replace(theirs, name), replace=True)
    engine.clear_hot()
    check_answer(engine, prompts, "bad signature")
    assert mine.stats().damaged >= 3
    check_recovered(engine, prompts)


@needs_redis
def test_a_slow_tier_has_a_deadline(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, server: RedisServer
) -> None:
    engine = engine_on(open_store([server.url(deadline=0.3, pause=60)], secret=SECRET))
    engine.warm(prompts, FACTS)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        engine.clear_hot()
        check_answer(engine, prompts, "store too slow")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@needs_redis
def test_a_tier_that_dies_and_one_in_front_that_lives(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, server: RedisServer, tmp_path: Path
) -> None:
    shared = open_store([server.url(pause=0.01)], secret=SECRET)
    engine = engine_on(shared)
    engine.warm(prompts, FACTS)
    server.kill()
    engine.clear_hot()
    check_answer(engine, prompts, "store unreachable")
    front = engine_on(TieredStore([DiskStore(tmp_path / "kv"), shared]))
    report = front.warm(prompts, FACTS)
    assert report.computed == 3
    assert "did not take chunk KV" in report.refused[0]
    check_recovered(front, prompts)


def test_new_chunks_of_a_prompt_hit_the_next_time(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder
) -> None:
    engine = engine_on(MemoryStore())
    a, b, c = FACTS
    d = "The national dish of Freedonia is a soup of beets and plums, served cold on the first day of spring."

    def computed(*passages: str) -> list[bool]:
        layout = prompts.build(passages=passages, question=QUESTION)
        report = engine.generate(layout, max_tokens=1).report
        return [segment.computed > 0 for segment in report.segments if segment.kind == "chunk"]

    assert computed(a, b) == [True, True]
    assert computed(a, c) == [False, True]
    assert computed(a, c, d) == [False, False, True]
    warmed = engine_on(MemoryStore())
    warmed.warm(prompts, [c])
    key = engine.key(prompts.chunk_ids(c), prompts.prefix_ids)
    kept, expected = (store.get(key).data for store in (engine.store, warmed.store))  # as if it had been warmed
    torch.testing.assert_close(kept, expected, atol=1e-2, rtol=1e-2)


def test_another_text_of_a_warmed_document_is_said(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder, tmp_path: Path
) -> None:
    for store in (MemoryStore(), DiskStore(tmp_path / "kv")):
        engine = engine_on(store)
        engine.warm(prompts, [Passage(FACTS[0], document="freedonia.md")])
        parent = Passage(f"{FACTS[0]} {FACTS[1]}", document="freedonia.md")
        layout = prompts.build(passages=[parent, Passage(FACTS[2], document="trains.md")], question=QUESTION)
        report = engine.generate(layout, max_tokens=1).report
        assert report.misses == {"text differs from warmed": 1, "never warmed": 1}
        assert engine.generate(layout, max_tokens=1).report.misses == {}, "warmed on first use"
        assert engine.forget_document("freedonia.md") == 2


def test_new_chunks_are_not_kept_when_told_so(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder
) -> None:
    engine = engine_on(MemoryStore(), keep_new=False)
    layout = prompts.build(passages=FACTS, question=QUESTION)
    engine.generate(layout, max_tokens=1)
    engine.generate(layout, max_tokens=1, policy=FULL_PREFILL)
    assert engine.store.stats().chunks == 0
    keeping = engine_on(MemoryStore())
    keeping.generate(layout, max_tokens=1, policy=FULL_PREFILL)
    assert keeping.store.stats().chunks == 0, "full prefill neither takes nor gives"


def test_streamed_and_async_answers_keep_new_chunks_too(
    engine_on: Callable[..., TransformersEngine], prompts: PromptBuilder
) -> None:
    import asyncio

    layout = prompts.build(passages=FACTS, question=QUESTION)
    streaming, waiting = engine_on(MemoryStore()), engine_on(MemoryStore())
    list(streaming.stream(layout, max_tokens=2))
    asyncio.run(waiting.agenerate(layout, max_tokens=2))
    assert streaming.store.stats().chunks == waiting.store.stats().chunks == 4  # three and the prefix
