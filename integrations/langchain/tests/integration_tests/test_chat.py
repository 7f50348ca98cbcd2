"""The chat model: streams, batches, tools, caches, metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from blend_rag import RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.in_band import enclose
from langchain_blend_rag import BlendPrompt, ChatBlend, Warmer
from tests.conftest import FACTS, QUESTION

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def prompt() -> BlendPrompt:
    return BlendPrompt(system="Answer from the passages.")


def engine_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    sync, twin = TransformersEngine.generate, TransformersEngine.agenerate

    def generate(self: TransformersEngine, layouts: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(layouts))
        return sync(self, layouts, *args, **kwargs)

    async def agenerate(self: TransformersEngine, layouts: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(layouts))
        return await twin(self, layouts, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    monkeypatch.setattr(TransformersEngine, "agenerate", agenerate)
    return sizes


def test_batches_reach_the_engine_as_batches(
    make_chat: Callable[..., ChatBlend], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = make_chat()
    questions = [QUESTION, "Who rules?", "Why?", "What is eaten?"]
    single = [chat.invoke(question).text for question in questions]
    sizes = engine_batches(monkeypatch)
    assert [answer.text for answer in chat.batch(questions)] == single
    assert [answer.text for answer in asyncio.run(chat.abatch(questions))] == single
    assert sizes == [4, 4]
    sizes.clear()
    chat.batch(questions, {"max_concurrency": 3})
    assert sizes == [3, 1]
    assert chat.batch([]) == []


def test_one_bad_prompt_does_not_hold_up_a_batch(make_chat: Callable[..., ChatBlend]) -> None:
    chat = make_chat()
    bad = [HumanMessage([{"type": "image_url", "image_url": "x"}])]
    answers = chat.batch([QUESTION, bad, "Why?"], return_exceptions=True)
    assert [type(answer).__name__ for answer in answers] == ["AIMessage", "ValueError", "AIMessage"]
    twins = asyncio.run(chat.abatch([QUESTION, bad, "Why?"], return_exceptions=True))
    assert [type(answer).__name__ for answer in twins] == ["AIMessage", "ValueError", "AIMessage"]
    with pytest.raises(ValueError, match="image_url"):
        chat.batch([QUESTION, bad])


def test_sampling_is_the_same_sync_and_async(make_chat: Callable[..., ChatBlend]) -> None:
    chat = make_chat(temperature=1.0, seed=11, top_p=0.9, top_k=40)
    whole = chat.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole

    async def go() -> tuple[str, str]:
        streamed = [chunk.text async for chunk in chat.astream(QUESTION)]
        return (await chat.ainvoke(QUESTION)).text, "".join(streamed)

    assert asyncio.run(go()) == (whole, whole)
    assert chat.invoke(QUESTION, seed=12).text != whole


def test_tokens_stream_one_by_one(make_chat: Callable[..., ChatBlend]) -> None:
    started = time.perf_counter()
    times = [time.perf_counter() - started for _ in make_chat(max_tokens=24).stream(QUESTION, ignore_eos=True)]
    assert len(times) > 10
    assert times[0] < times[-1] / 2


def test_answers_carry_usage_and_metadata(
    make_chat: Callable[..., ChatBlend], prompt: BlendPrompt, documents: list[Document]
) -> None:
    chat = make_chat()
    value = prompt.invoke({"context": documents, "question": QUESTION})
    Warmer(chat, prompt).warm(documents)
    answer = chat.invoke(value)
    usage, metadata = answer.usage_metadata, answer.response_metadata
    details = usage["input_token_details"]
    assert usage["input_tokens"] == len(chat.layout(value)) == sum(details.values())
    assert details["cache_read"] > 0.5 * usage["input_tokens"]
    assert metadata["model_name"] == chat.model_name
    assert metadata["finish_reason"] in ("stop", "length")
    assert metadata["ttft_s"] > 0
    assert metadata["blend_rag"]["misses"] == {}
    *_, last = chat.stream(value)
    assert last.chunk_position == "last"
    assert last.usage_metadata["total_tokens"] == usage["total_tokens"]


def test_n_answers(make_chat: Callable[..., ChatBlend]) -> None:
    chat = make_chat(n=3, temperature=1.2, seed=3)
    [row] = chat.generate([[HumanMessage(QUESTION)]]).generations
    assert len(row) == 3
    assert len({generation.text for generation in row}) > 1


def test_caches_tell_policies_and_passages_apart(
    make_chat: Callable[..., ChatBlend], prompt: BlendPrompt, documents: list[Document]
) -> None:
    cache = InMemoryCache()
    set_llm_cache(cache)
    try:
        value = prompt.invoke({"context": documents, "question": QUESTION})
        plain = [SystemMessage("Answer from the passages."), HumanMessage(value.to_messages()[-1].content)]
        first = make_chat().invoke(value)
        assert make_chat().invoke(value).text == first.text
        assert len(cache._cache) == 1
        make_chat().invoke(plain)
        make_chat(policy=RecomputePolicy(ratio=0.5)).invoke(value)
        assert len(cache._cache) == 3
    finally:
        set_llm_cache(None)


def test_tools_need_a_template_that_shows_them(make_chat: Callable[..., ChatBlend]) -> None:
    with pytest.raises(NotImplementedError, match="shows no tools"):
        make_chat().bind_tools([add])
    with pytest.raises(NotImplementedError, match="shows no tools"):
        make_chat().with_structured_output({"title": "x", "type": "object", "properties": {}})
    chat = make_chat(template_kwargs={"chat_template": TOOL_TEMPLATE})
    assert chat.profile["tool_calling"]
    schema = chat.bind_tools([add]).kwargs["tools"][0]
    assert schema["function"]["name"] == "add"
    tokens = chat.layout([HumanMessage("1 + 2?")], tools=[add]).token_ids
    assert '"name": "add"' in chat.engine.tokenizer.decode(tokens)
    assert isinstance(chat.bind_tools([add]).invoke("1 + 2?"), AIMessage)


def test_tool_calls_are_read_from_answers(make_chat: Callable[..., ChatBlend], monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make_chat(template_kwargs={"chat_template": TOOL_TEMPLATE})
    from dataclasses import replace

    real = TransformersEngine._answer

    def calling(self: TransformersEngine, *args: Any) -> Any:
        written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        return [replace(answer, text=written) for answer in real(self, *args)]

    monkeypatch.setattr(TransformersEngine, "_answer", calling)
    bound = chat.bind_tools([add])
    for answer in (bound.invoke("1 + 2?"), sum_chunks(bound.stream("1 + 2?"))):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
        assert answer.text == ""
    assert chat.invoke("1 + 2?").tool_calls == [], "without tools it is text"
    structured = chat.with_structured_output(
        {"title": "add", "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    )
    assert structured.invoke("1 + 2?") == {"a": 1, "b": 2}


def sum_chunks(chunks: Any) -> Any:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def test_tokens_are_counted_with_the_models_tokenizer(make_chat: Callable[..., ChatBlend]) -> None:
    chat = make_chat()
    assert chat.get_token_ids("hello world") == chat.engine.tokenizer("hello world")["input_ids"]
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) == len(chat.layout(QUESTION))
    assert chat.profile["max_input_tokens"] == chat.engine.max_model_len


@pytest.mark.slow
def test_answers_hold_no_separators(make_chat: Callable[..., ChatBlend], documents: list[Document]) -> None:
    """Twenty greedy answers, out of band and in band."""
    prompt = BlendPrompt(system="Answer from the passages.", document_separator="\n***\n")
    questions = [f"Tell me about the {name} of Freedonia." for name in FACTS] + ["What is odd about Freedonia?"]
    inputs = [
        {"context": order, "question": question} for question in questions for order in (documents, documents[::-1])
    ]
    answers = (prompt | make_chat(max_tokens=24)).batch(inputs)
    assert not any("***" in answer.text for answer in answers)
    joined = [
        "".join(enclose(document.page_content) for document in given["context"]) + given["question"] for given in inputs
    ]
    answers = make_chat(max_tokens=24).batch(joined)
    assert not any("chunk-border" in answer.text for answer in answers)
    assert all(answer.response_metadata["blend_rag"]["segments"] for answer in answers)


def test_an_engine_loaded_here_is_closed_here(make_chat: Callable[..., ChatBlend]) -> None:
    with ChatBlend(max_tokens=2) as chat:
        assert chat.invoke("Hello").text
    with pytest.raises(Exception, match="closed"):
        chat.invoke("Hello")
    given = make_chat()
    given.close()
    assert given.invoke("Hello").text
