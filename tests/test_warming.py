"""Warming: KV that one process computes, others use, whatever happens to them on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blend_rag import DiskStore, PromptBuilder, RecomputePolicy, open_store
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import CorpusError
from blend_rag.warming import warm_documents
from tests.stores.cases import wait_for
from tests.stores.redis_server import PROGRAM, RedisServer

SECRET = "correct horse battery staple"
COMMAND = [sys.executable, "-c", "from blend_rag.cli import main; main()"]
SYSTEM = "Answer the question from the passages, briefly."


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "towers.txt").write_text("The lighthouse on the northern cape was finished in 1871.\n")
    (folder / "boats.md").write_text("The ferry to the islands leaves at six in the morning.\n")
    (folder / "more.md").write_text("The ferry to the islands leaves at six in the morning.\n")
    return folder


def long_library(folder: Path, documents: int) -> Path:
    from pydoc_data import topics

    folder.mkdir()
    longest = sorted(topics.topics, key=lambda name: len(topics.topics[name]))[-documents:]
    for name in longest:
        (folder / f"{name}.txt").write_text(topics.topics[name][:12_000])
    return folder


def engine_on(engine: TransformersEngine, store: object) -> TransformersEngine:
    return TransformersEngine.from_loaded(
        engine.decoder.model, engine.tokenizer, store=store, self_test=False, policy=RecomputePolicy()
    )


def test_documents_are_warmed_skipped_and_forgotten(
    engine: TransformersEngine, prompts: PromptBuilder, library: Path, tmp_path: Path
) -> None:
    warming = engine_on(engine, f"file://{tmp_path}/kv")
    first = warm_documents(warming, prompts, [library])
    assert (first.documents, first.passages, first.report.chunks) == (3, 3, 2)
    assert (first.report.computed, first.report.present) == (2, 0)
    again = warm_documents(warming, prompts, [library])
    assert (again.report.computed, again.report.present) == (0, 2)
    assert warming.forget_document(str(library / "boats.md")) == 0, "more.md says the same"
    assert warming.forget_document(str(library / "more.md")) == 1
    assert warming.forget_document(str(library / "towers.txt")) == 1
    assert warm_documents(warming, prompts, [library]).report.computed == 2
    warming.close()
    with pytest.raises(CorpusError, match="no file or folder"):
        warm_documents(engine, prompts, [library / "none"])


@pytest.mark.slow
def test_what_one_process_warms_another_reuses(engine: TransformersEngine, library: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    done = run("warm", str(library), "--store", url, "--json")
    assert done.returncode == 0, done.stderr
    warmed = json.loads(done.stdout)
    assert (warmed["documents"], warmed["chunks"], warmed["computed"], warmed["refused"]) == (3, 2, 2, [])
    assert f"disk {tmp_path}/kv" in warmed["store"]
    prompts = PromptBuilder(engine.tokenizer, system=SYSTEM)
    reusing = engine_on(engine, url)
    texts = [path.read_text().strip() for path in sorted(library.glob("[bt]*"))]
    report = reusing.generate(prompts.build(passages=texts, question="When?"), max_tokens=1).report
    assert report.misses == {}
    assert [segment.computed for segment in report.segments if segment.kind == "chunk"] == [0, 0]
    reusing.close()
    second = json.loads(run("warm", str(library), "--store", url, "--json").stdout)
    assert (second["computed"], second["present"]) == (0, 2)


@pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")
def test_one_warms_into_redis_and_another_reuses_bit_by_bit(
    engine: TransformersEngine, prompts: PromptBuilder, library: Path, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    try:
        mine = open_store([f"file://{tmp_path}/a", server.url()], secret=SECRET)
        warming = engine_on(engine, mine)
        warm_documents(warming, prompts, [library])
        yours = open_store([server.url()], secret=SECRET)
        reusing = engine_on(engine, yours)
        texts = [path.read_text().strip() for path in sorted(library.glob("[bt]*"))]
        layout = prompts.build(passages=texts, question="When?")
        assert reusing.generate(layout, max_tokens=8).token_ids == warming.generate(layout, max_tokens=8).token_ids
        report = reusing.generate(layout, max_tokens=1).report
        assert report.misses == {}
        for text in texts:
            key = warming.key(prompts.chunk_ids(text), prompts.prefix_ids)
            assert torch.equal(DiskStore.get(mine.tiers[0], key).data, yours.get(key).data)
        stranger = engine_on(engine, open_store([server.url()], secret="another deployment's secret"))
        report = stranger.generate(layout, max_tokens=1).report
        assert report.misses == {"never warmed": 2}
    finally:
        server.kill()


def test_namespaces_do_not_meet(engine: TransformersEngine, prompts: PromptBuilder, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")

    def tenant(namespace: str) -> TransformersEngine:
        return TransformersEngine.from_loaded(
            engine.decoder.model, engine.tokenizer, store=store, namespace=namespace, self_test=False
        )

    passage = "The lighthouse on the northern cape was finished in 1871."
    tenant("a").warm(prompts, [passage])
    layout = prompts.build(passages=[passage], question="When?")
    assert tenant("b").generate(layout, max_tokens=1).report.misses == {"never warmed": 1}
    assert tenant("a").generate(layout, max_tokens=1).report.misses == {}


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    library = long_library(tmp_path / "library", 8)
    command = [*COMMAND, "warm", str(library), "--store", f"file://{tmp_path}/kv", "--json"]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list((tmp_path / "kv").glob("objects/*/*"))) > 20, seconds=120)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    kept = len(list((tmp_path / "kv").glob("objects/*/*"))) - 1  # without the prefix
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["chunks"] > report["present"] >= kept > 0
    assert report["computed"] == report["chunks"] - report["present"]
    assert run("store", "verify", "--store", f"file://{tmp_path}/kv").returncode == 0


@pytest.mark.slow
def test_two_processes_warm_the_same_documents(tmp_path: Path) -> None:
    library = long_library(tmp_path / "library", 6)
    command = [*COMMAND, "warm", str(library), "--store", f"file://{tmp_path}/kv", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    reports = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    chunks = reports[0]["chunks"]
    store = DiskStore(tmp_path / "kv")
    assert store.stats().chunks == chunks + 1
    assert store.verify().damaged == ()
    third = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (third["computed"], third["present"]) == (0, chunks)


# The commands that look after a store


@pytest.mark.slow
def test_store_commands(library: Path, tmp_path: Path) -> None:
    named = ["--store", f"file://{tmp_path}/kv"]
    store = DiskStore(tmp_path / "kv")
    from tests.stores.cases import key, kv

    store.put(key(1), kv(1), [str(library / "boats.md")])
    store.put(key(2, namespace="tenant"), kv(2))
    store.put(key(3), kv(3))
    found = json.loads(run("store", "stats", *named, "--json").stdout)
    assert found["chunks"] == 3
    assert [tier["tier"].split()[0] for tier in found["tiers"]] == ["memory", "disk"]
    assert json.loads(run("store", "stats", *named, "--namespace", "tenant", "--json").stdout)["chunks"] == 1
    assert "3 chunks" in run("store", "stats", *named).stdout
    os.truncate(store._path(store._index.file_of(key(3).digest)), 50)
    checked = run("store", "verify", *named, "--json")
    assert checked.returncode == 1
    assert json.loads(checked.stdout) == {"checked": 3, "damaged": [key(3).digest]}
    assert run("store", "verify", *named).returncode == 0
    gone = run("store", "purge", *named, "--document", str(library / "boats.md"), "--json")
    assert json.loads(gone.stdout) == {"removed": 1}
    assert json.loads(run("store", "purge", *named, "--namespace", "tenant", "--json").stdout) == {"removed": 1}
    assert run("store", "purge", *named, "--all").stdout == "0 chunks deleted\n"
    unclear = run("store", "purge", *named)
    assert unclear.returncode == 1
    assert "--document, --namespace, or --all" in unclear.stderr


def test_the_store_comes_from_the_environment_and_shared_ones_need_a_secret(tmp_path: Path) -> None:
    assert "1 chunks" not in run("store", "stats", BLEND_RAG_STORE="memory://").stdout
    refused = run("store", "stats", BLEND_RAG_STORE="redis://:hunter2@127.0.0.1:1/0")
    assert refused.returncode == 1
    assert "BLEND_RAG_STORE_SECRET" in refused.stderr
    assert "hunter2" not in refused.stderr + refused.stdout
    opened = run(
        "store", "stats", "--store", f"file://{tmp_path}/kv", "--store", "redis://127.0.0.1:1/0", "--allow-unsigned"
    )
    assert opened.returncode == 0, opened.stderr
    assert "redis 127.0.0.1:1/0: chunks unknown" in opened.stdout
