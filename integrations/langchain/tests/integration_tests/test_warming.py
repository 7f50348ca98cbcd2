"""Warming on ingestion, and what retrievers hand out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from blend_rag import DiskStore
from blend_rag.engines.transformers import TransformersEngine
from langchain_blend_rag import BlendPrompt, BlendRetriever, ChatBlend, Warmer, WarmingVectorStore
from tests.conftest import FACTS, QUESTION

SYSTEM = "Answer from the passages."


def make_store(chat: ChatBlend, prompt: BlendPrompt) -> WarmingVectorStore:
    return WarmingVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), Warmer(chat, prompt))


def misses(chat: ChatBlend, prompt: BlendPrompt, documents: list[Document]) -> dict[str, int]:
    answer = chat.invoke(prompt.invoke({"context": documents, "question": QUESTION}))
    return answer.response_metadata["blend_rag"]["misses"]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each warm-up computed."""
    counts: list[int] = []
    warm = TransformersEngine.warm

    def counted(self: TransformersEngine, *args: Any, **kwargs: Any) -> Any:
        report = warm(self, *args, **kwargs)
        counts.append(report.computed)
        return report

    monkeypatch.setattr(TransformersEngine, "warm", counted)
    return counts


def thirty() -> list[Document]:
    return [
        Document(f"Fact {number} about Freedonia: {fact}", metadata={"source": f"{number}.md"})
        for number, fact in enumerate(list(FACTS.values()) * 8)
    ][:30]


def test_re_indexing_warms_what_changed(make_chat: Callable[..., ChatBlend], computed: list[int]) -> None:
    chat = make_chat(max_tokens=1)
    prompt = BlendPrompt(system=SYSTEM, document_prompt=PromptTemplate.from_template("[{source}] {page_content}"))
    store, records = make_store(chat, prompt), InMemoryRecordManager("library")
    records.create_schema()
    documents = thirty()
    options = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256", "batch_size": 10}
    assert index(documents, records, store, **options)["num_added"] == 30
    assert computed == [10, 10, 10]
    computed.clear()
    documents[7] = Document("Fact 7 is new.", metadata={"source": "7.md"})
    result = index(documents, records, store, **options)
    assert (result["num_added"], result["num_deleted"], result["num_skipped"]) == (1, 1, 29)
    assert computed == [1]
    assert chat.engine.store.stats().chunks == 31, "30 documents and the prefix: the old text's KV is gone"
    found = store.as_retriever(search_kwargs={"k": 6}).invoke("Freedonia")
    assert misses(chat, prompt, found) == {}
    assert asyncio.run(store.asimilarity_search("Freedonia", k=2)) == store.similarity_search("Freedonia", k=2)


def test_another_system_prompt_is_said_and_warmed_again(
    make_chat: Callable[..., ChatBlend], documents: list[Document]
) -> None:
    chat = make_chat(max_tokens=1)
    store = make_store(chat, BlendPrompt(system=SYSTEM))
    store.add_documents(documents)
    other = BlendPrompt(system="Answer in one word.")
    assert misses(chat, other, documents) == {"other prefix": 4}
    Warmer(chat, other).warm(documents)
    assert misses(chat, other, documents) == {}


KILLED = """
import sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_blend_rag import BlendPrompt, ChatBlend, Warmer, WarmingVectorStore
from tests.integration_tests.test_warming import SYSTEM, thirty

warmer = Warmer(ChatBlend(store=sys.argv[1]), BlendPrompt(system=SYSTEM))
store = WarmingVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), warmer)
for document in thirty() * 1000:
    store.add_documents([document])
"""


@pytest.mark.slow
def test_a_killed_warm_up_goes_on_where_it_stopped(engine: TransformersEngine, tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, f"file://{tmp_path}/kv"])
    until = time.monotonic() + 60
    while len(list((tmp_path / "kv").glob("objects/*/*"))) < 8:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    store = DiskStore(tmp_path / "kv")
    kept = store.stats().chunks - 1  # without the prefix
    assert 7 <= kept < 30
    again = TransformersEngine.from_loaded(engine.decoder.model, engine.tokenizer, store=store, self_test=False)
    report = Warmer(ChatBlend(engine=again), BlendPrompt(system=SYSTEM)).warm(thirty())
    assert (report.present, report.computed) == (kept, 30 - kept)


def test_public_methods_have_twins_that_give_the_same(
    make_chat: Callable[..., ChatBlend], documents: list[Document]
) -> None:
    chat = make_chat()
    warmer = Warmer(chat, BlendPrompt(system=SYSTEM))

    async def twins() -> None:
        assert (await warmer.awarm(documents[:2])).computed == 2
        assert await warmer.ahave_kv(documents) == warmer.have_kv(documents) == [True, True, False, False]
        assert await warmer.aforget(["capital", "none"]) == 1
        assert warmer.forget(["king"]) == 1
        assert await warmer.ahave_kv([]) == warmer.have_kv([]) == []

    asyncio.run(twins())
    for kind in (ChatBlend, BlendRetriever, BlendPrompt, Warmer, WarmingVectorStore):
        own = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        async_names = {name for name in own if asyncio.iscoroutinefunction(getattr(kind, name))}
        assert {name.removeprefix("a") for name in async_names} <= own | {"batch"}, kind


def test_a_failed_warm_up_is_counted_not_raised(
    make_chat: Callable[..., ChatBlend], documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no memory")

    store = make_store(make_chat(), BlendPrompt())
    with monkeypatch.context() as broken:
        broken.setattr(TransformersEngine, "warm", fail)
        assert store.add_documents(documents) == list(FACTS)
        assert asyncio.run(store.aadd_texts(["one more"], ids=["more"])) == ["more"]
        broken.setattr(TransformersEngine, "forget_document", fail)
        store.delete(["more"])
    assert store.warm_failures == 3
    assert len(store.get_by_ids(list(FACTS))) == 4


def test_deleting_drops_kv_that_nobody_else_uses(make_chat: Callable[..., ChatBlend]) -> None:
    chat = make_chat()
    store = make_store(chat, BlendPrompt(system=SYSTEM))
    store.add_texts([FACTS["king"], FACTS["king"], FACTS["food"]], ids=["a", "b", "c"])
    assert chat.engine.store.stats().chunks == 3
    store.delete(["a"])
    assert chat.engine.store.stats().chunks == 3
    asyncio.run(store.adelete(["b", "c"]))
    assert chat.engine.store.stats().chunks == 1, "the prefix"


def test_what_is_prompted_with_another_text_is_said(
    make_chat: Callable[..., ChatBlend], documents: list[Document]
) -> None:
    chat = make_chat(max_tokens=1)
    prompt = BlendPrompt(system=SYSTEM)
    make_store(chat, prompt).add_documents(documents)
    parents = [
        document.model_copy(update={"page_content": "Chapter one. " + document.page_content}) for document in documents
    ]
    assert misses(chat, prompt, parents) == {"text differs from warmed": 4}
    assert misses(chat, prompt, parents) == {}, "warmed on first use"


# The retriever


def plain_retriever(documents: list[Document]) -> Any:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
    store.add_documents(documents)
    return store.as_retriever(search_kwargs={"k": len(documents)})


def test_documents_are_untouched_out_of_band(documents: list[Document]) -> None:
    plain = plain_retriever(documents)
    assert BlendRetriever(retriever=plain).invoke("king") == plain.invoke("king")
    assert asyncio.run(BlendRetriever(retriever=plain).ainvoke("king")) == plain.invoke("king")


def test_duplicates_go(documents: list[Document]) -> None:
    twice = [*documents, documents[0].model_copy(update={"id": "again"})]
    texts = [document.page_content for document in BlendRetriever(retriever=plain_retriever(twice)).invoke("king")]
    assert sorted(texts) == sorted(FACTS.values())
    both = BlendRetriever(retriever=plain_retriever(twice), remove_duplicates=False).invoke("king")
    assert len(both) == 5


def test_cached_documents_can_come_first(make_chat: Callable[..., ChatBlend], documents: list[Document]) -> None:
    warmer = Warmer(make_chat(), BlendPrompt(system=SYSTEM))
    plain = plain_retriever(documents)
    ranked = [document.id for document in plain.invoke("king")]
    warmer.warm([document for document in documents if document.id in ranked[2:]])
    first = BlendRetriever(retriever=plain, cached_first=True, warmer=warmer).invoke("king")
    assert [document.id for document in first] == [*ranked[2:], *ranked[:2]]
    with pytest.raises(ValueError, match="warmer"):
        BlendRetriever(retriever=plain, cached_first=True)


# The prompt


def test_what_does_not_fit_is_left_out_whole_and_named(fresh: TransformersEngine, documents: list[Document]) -> None:
    short = TransformersEngine.from_loaded(
        fresh.decoder.model, fresh.tokenizer, store=fresh.store, self_test=False, max_model_len=120
    )
    chat = ChatBlend(engine=short, max_tokens=8)
    prompt = BlendPrompt(system=SYSTEM, llm=chat)
    value = prompt.invoke({"context": documents, "question": QUESTION})
    assert len(chat.layout(value)) <= 112
    kept = [segment.text for segment in chat.layout(value).segments if segment.kind == "chunk"]
    assert kept == list(FACTS.values())[: len(kept)]
    assert 1 <= len(kept) < 4
    dropped = chat.invoke(value).response_metadata["blend_rag"]["dropped_documents"]
    assert dropped == [f"{name}.md" for name in list(FACTS)[len(kept) :]]


def test_templates_and_document_prompts(make_chat: Callable[..., ChatBlend], documents: list[Document]) -> None:
    chat = make_chat(max_tokens=1)
    prompt = BlendPrompt(
        system=SYSTEM,
        template="Q: {question}\nUse {{these}}:\n{context}\nBe brief.",
        document_prompt=PromptTemplate.from_template("({source}) {page_content}"),
    )
    value = prompt.invoke({"context": documents[:2], "question": "Who?"})
    text = f"Q: Who?\nUse {{these}}:\n(capital.md) {FACTS['capital']}\n\n(king.md) {FACTS['king']}\nBe brief."
    assert value.to_messages()[-1].content == text
    Warmer(chat, prompt).warm(documents)
    assert misses(chat, prompt, documents) == {}
    assert asyncio.run(prompt.ainvoke({"context": documents[:2], "question": "Who?"})) == value


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"question": "Who?"}, KeyError, "needs context"),
        ({"context": "text", "question": "Who?"}, TypeError, "list of documents"),
    ],
)
def test_bad_input_is_said(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlendPrompt().invoke(given)
    with pytest.raises(ValueError, match="once each"):
        BlendPrompt(template="{context} alone")
