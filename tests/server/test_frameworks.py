"""LangChain, LlamaIndex, ordinary OpenAI clients and the command line, over a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.openai_like import OpenAILike
from typer.testing import CliRunner

import langchain_blend_rag as lc
import llama_index.llms.blend_rag as li
from blend_rag import Passage, cli
from blend_rag.engines.requests import RequestEngine
from blend_rag.engines.transformers import TransformersEngine
from tests.server.conftest import BORDER, KEY
from tests.server.processes import VLLMServer

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) }}"
    "{{ ', call as <tool_call><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "Answer from the passages."


def reuse(segments: list[dict]) -> float:
    """Share of chunk tokens that were not computed as new."""
    chunks = [segment for segment in segments if segment["kind"] == "chunk"]
    assert chunks, "the passages were not found"
    return 1 - sum(chunk["computed"] for chunk in chunks) / sum(chunk["tokens"] for chunk in chunks)


def settled(check: Callable[[], bool]) -> bool:
    """Whether something holds soon: new chunks are kept after the answer."""
    for _ in range(40):
        if check():
            return True
        time.sleep(0.25)
    return False


# LangChain


@pytest.fixture
def chat(server: VLLMServer) -> Iterator[lc.ChatBlend]:
    with closing(lc.ChatBlend(engine=server.url, api_key=KEY, max_tokens=12)) as chat:
        yield chat


@pytest.fixture
def documents(passages: list[Passage]) -> list[Document]:
    return [Document(passage.text, id=f"lc {number}") for number, passage in enumerate(passages[70:78])]


def test_a_langchain_chain_warms_on_ingestion_and_reuses_in_any_order(
    chat: lc.ChatBlend, documents: list[Document], engine: TransformersEngine
) -> None:
    prompt = lc.BlendPrompt(system=SYSTEM, llm=chat)
    warmer = lc.Warmer(chat, prompt)
    store = lc.WarmingVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), warmer)
    store.add_documents(documents[:6])
    assert store.warm_failures == 0
    assert warmer.have_kv(documents) == [True] * 6 + [False] * 2
    retriever = lc.BlendRetriever(
        retriever=store.as_retriever(search_kwargs={"k": 4}), cached_first=True, warmer=warmer
    )
    chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat
    answer = chain.invoke("What is a string?")
    assert isinstance(answer, AIMessage)
    assert reuse(answer.response_metadata["blend_rag"]["segments"]) == 1.0
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 200
    pieces = list(chain.stream("What is a string?"))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert len([piece for piece in pieces if piece.text]) > 3
    assert pieces[-1].usage_metadata or pieces[-2].usage_metadata
    embedded = lc.ChatBlend(engine=engine, max_tokens=12)
    value = (({"context": retriever, "question": RunnablePassthrough()}) | prompt).invoke("What is a string?")
    assert chat.layout(value).token_ids == embedded.layout(value).token_ids
    assert asyncio.run(chain.ainvoke("What is a string?")).text == answer.text
    store.delete([documents[0].id])
    assert store.warm_failures == 0
    assert warmer.have_kv(documents[:2])[1] is True


def test_langchain_batches_and_several_answers(chat: lc.ChatBlend, documents: list[Document]) -> None:
    prompt = lc.BlendPrompt(system=SYSTEM)
    values = [prompt.invoke({"context": documents[at : at + 3], "question": f"What is {at}?"}) for at in range(4)]
    alone = [chat.invoke(value).text for value in values]
    assert [answer.text for answer in chat.batch(values)] == alone
    two = chat.generate_prompt([values[0]], n=2, temperature=1.0, seed=3).generations[0]
    assert len(two) == 2
    assert two[0].text != two[1].text
    text = lc.BlendLLM(engine=chat.engine, max_tokens=6)
    assert text.invoke("Once upon a time")


def test_stop_strings_and_tool_calls(chat: lc.ChatBlend, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chat.invoke("Count from one to ten.", max_tokens=30).text
    stop = whole.split()[3]
    assert chat.invoke("Count from one to ten.", max_tokens=30, stop=[stop]).text == whole[: whole.index(stop)]

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tools = lc.ChatBlend(engine=chat.engine, max_tokens=4, template_kwargs={"chat_template": TOOL_TEMPLATE})
    bound = tools.bind_tools([add])
    assert "Add two numbers" in chat.engine.tokenizer.decode(tools.layout("1 + 2?", tools=[add]).token_ids)
    assert isinstance(bound.invoke("1 + 2?"), AIMessage)
    real = RequestEngine._answer

    async def calling(self: RequestEngine, *args: Any) -> Any:
        written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        return replace(await real(self, *args), text=written)

    monkeypatch.setattr(RequestEngine, "_answer", calling)
    for answer in (bound.invoke("1 + 2?"), list(bound.stream("1 + 2?"))[-1]):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert tools.invoke("1 + 2?").tool_calls == [], "without tools it is text"


def test_an_ordinary_openai_client_of_langchain_gets_reuse_through_separators(
    server: VLLMServer, documents: list[Document]
) -> None:
    client = ChatOpenAI(base_url=f"{server.url}/v1", api_key=KEY, model="smollm2", temperature=0, max_tokens=8)
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents(documents)
    retriever = lc.BlendRetriever(
        retriever=store.as_retriever(search_kwargs={"k": 4}), in_band=True, in_band_separator=BORDER
    )
    prompt = ChatPromptTemplate([("system", SYSTEM), ("human", "{context}\n\n{question}")])
    chain = create_stuff_documents_chain(client, prompt, document_separator="\n\n")
    found = retriever.invoke("anything")
    before = server.metric("blend_rag_tokens", outcome="host") + server.metric("blend_rag_tokens", outcome="store")

    def asks() -> bool:
        answer = chain.invoke({"context": found[::-1], "question": f"What is it? {time.monotonic()}"})
        assert answer
        assert BORDER not in answer
        now = server.metric("blend_rag_tokens", outcome="host") + server.metric("blend_rag_tokens", outcome="store")
        return now - before > 200

    chain.invoke({"context": found, "question": "What is it?"})
    assert settled(asks)
    pieces = list(client.stream([HumanMessage("Why is the sky blue?")]))
    assert len(pieces) > 3
    assert lc.original_documents(found)[0].page_content in {document.page_content for document in documents}


# LlamaIndex


@pytest.fixture
def llm(server: VLLMServer) -> Iterator[li.BlendLLM]:
    with closing(li.BlendLLM(engine=server.url, api_key=KEY, max_tokens=12)) as llm:
        yield llm


@pytest.fixture
def nodes(passages: list[Passage]) -> list[TextNode]:
    return [TextNode(text=passage.text, id_=f"li {number}") for number, passage in enumerate(passages[80:88])]


def test_a_llamaindex_query_engine_warms_on_ingestion_and_reuses(
    llm: li.BlendLLM, nodes: list[TextNode], engine: TransformersEngine
) -> None:
    synthesizer = li.BlendSynthesizer(llm=llm, system_prompt=SYSTEM)
    warmer = li.Warmer(synthesizer)
    store = li.WarmingVectorStore(SimpleVectorStore(stores_text=False), warmer)
    index = VectorStoreIndex(
        nodes, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=MockEmbedding(8)
    )
    assert warmer.failures == 0
    assert all(warmer.have_kv(nodes))
    queries = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=4)
    response = queries.query("What is a string?")
    assert str(response)
    told = llm.complete_segments(
        synthesizer.builder.build(passages=[synthesizer.passage(node) for node in nodes[3::-1]], question="Why?")
    ).raw
    assert reuse(told["blend_rag"]["segments"]) == 1.0
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    streamed = index.as_query_engine(
        llm=llm,
        response_synthesizer=li.BlendSynthesizer(llm=llm, system_prompt=SYSTEM, streaming=True),
        similarity_top_k=4,
    ).query("What is a string?")
    assert "".join(streamed.response_gen) == str(response)
    here = li.BlendLLM(engine=engine, max_tokens=12)
    assert here.completion_layout("Why?").token_ids == llm.completion_layout("Why?").token_ids
    assert asyncio.run(llm.acomplete("Count to three.")).text == llm.complete("Count to three.").text
    assert llm.metadata.context_window == 2048


def test_an_ordinary_openai_client_of_llamaindex_gets_reuse_through_separators(
    server: VLLMServer, nodes: list[TextNode]
) -> None:
    client = OpenAILike(
        api_base=f"{server.url}/v1",
        api_key=KEY,
        model="smollm2",
        is_chat_model=True,
        temperature=0,
        max_tokens=8,
        context_window=2048,
    )
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    # the question last: what changes from one to the next must not stand before the passages
    template = PromptTemplate("Passages: {context_str}\n{query_str}")
    queries = index.as_query_engine(
        llm=client,
        similarity_top_k=3,
        node_postprocessors=[li.BlendPostprocessor(in_band=True, in_band_separator=BORDER)],
        response_synthesizer=get_response_synthesizer(llm=client, text_qa_template=template),
    )
    before = server.metric("blend_rag_tokens", outcome="host") + server.metric("blend_rag_tokens", outcome="store")

    def asks() -> bool:
        response = queries.query(f"What is it? {time.monotonic()}")
        assert BORDER not in str(response)
        original = li.original_nodes(response.source_nodes)[0].node.get_content(MetadataMode.NONE)
        assert original in {node.text for node in nodes}
        now = server.metric("blend_rag_tokens", outcome="host") + server.metric("blend_rag_tokens", outcome="store")
        return now - before > 150

    assert settled(asks)


# The command line


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments), env={"VLLM_API_KEY": KEY})
    return result.exit_code, result.stdout


def test_doctor_proves_a_server_and_names_what_is_wrong(server: VLLMServer) -> None:
    code, shown = run("doctor", "--engine", server.url, "--json")
    data = json.loads(shown)
    assert code == 0, shown
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["reuse at another position"]["ok"]
    assert checks["agreement with full prefill"]["ok"]
    assert checks["vllm"]["detail"] == "0.32.0"
    code, shown = run("doctor", "--engine", "http://127.0.0.1:9", "--json")
    assert code == 1
    assert "is the server running" in json.loads(shown)["checks"][-1]["detail"]


def test_the_command_line_warms_and_asks_a_server(server: VLLMServer, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("The ferry leaves at six.\n\nThe lighthouse was finished in 1871.\n" * 3)
    arguments = [str(tmp_path / "notes.md"), "--engine", server.url, "--json"]
    code, shown = run("warm", *arguments)
    assert code == 0
    assert json.loads(shown)["computed"] >= 1
    assert json.loads(run("warm", *arguments)[1])["computed"] == 0
    code, shown = run("ask", "When does the ferry leave?", "--docs", *arguments, "--max-tokens", "8")
    assert code == 0
    [answer] = json.loads(shown)["answers"]
    assert answer["answer"]
    assert answer["report"]["misses"] == {}
