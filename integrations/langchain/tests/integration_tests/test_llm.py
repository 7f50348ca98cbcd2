"""The text model, on the model of LangChain's suites for chat models: there is none for text models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache

from blend_rag import RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PolicyError
from blend_rag.in_band import enclose
from langchain_blend_rag import BlendLLM, BlendPrompt
from tests.conftest import FACTS, QUESTION


@pytest.fixture
def llm(fresh: TransformersEngine) -> BlendLLM:
    return BlendLLM(engine=fresh, max_tokens=16)


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[Any] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends.append(response)


def test_invoke_stream_and_batch_agree_sync_and_async(llm: BlendLLM) -> None:
    whole = llm.invoke(QUESTION)
    pieces = list(llm.stream(QUESTION))
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == whole
    assert llm.batch([QUESTION, QUESTION]) == [whole, whole]

    async def go() -> tuple[str, str, list[str]]:
        streamed = [piece async for piece in llm.astream(QUESTION)]
        return await llm.ainvoke(QUESTION), "".join(streamed), await llm.abatch([QUESTION])

    assert asyncio.run(go()) == (whole, whole, [whole])


def test_the_chat_template_is_applied_unless_told_otherwise(llm: BlendLLM, fresh: TransformersEngine) -> None:
    text = fresh.tokenizer.decode(llm.layout(QUESTION).token_ids)
    assert f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n" in text
    raw = BlendLLM(engine=fresh, chat=False)
    assert fresh.tokenizer.decode(raw.layout(QUESTION).token_ids) == QUESTION


def test_a_batch_reaches_the_engine_as_one(llm: BlendLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = TransformersEngine.generate

    def generate(self: TransformersEngine, layouts: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(layouts))
        return original(self, layouts, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    llm.batch([QUESTION, "Who rules?", "Why?"])
    assert sizes == [3]


def test_stop_strings_of_constructor_and_call(fresh: TransformersEngine, llm: BlendLLM) -> None:
    whole = llm.invoke(QUESTION)
    word = whole.split()[3]
    assert BlendLLM(engine=fresh, max_tokens=16, stop=[word]).invoke(QUESTION) == whole.partition(word)[0]
    assert llm.invoke(QUESTION, stop=[word]) == whole.partition(word)[0]
    assert "".join(llm.stream(QUESTION, stop=[word])) == whole.partition(word)[0]


def test_n_answers_with_usage(fresh: TransformersEngine) -> None:
    llm = BlendLLM(engine=fresh, max_tokens=8, n=3, temperature=1.2, seed=5)
    result = llm.generate([QUESTION, "Who rules?"])
    assert [len(row) for row in result.generations] == [3, 3]
    assert len({generation.text for generation in result.generations[0]}) > 1
    assert result.llm_output["token_usage"]["output_tokens"] == sum(
        generation.generation_info["usage_metadata"]["output_tokens"]
        for row in result.generations
        for generation in row
    )
    assert llm.generate([QUESTION]).generations[0][0].text == result.generations[0][0].text, "a seed repeats"


def test_callbacks_get_tokens_and_metadata(llm: BlendLLM) -> None:
    handler = Tokens()
    text = "".join(llm.stream(QUESTION, config={"callbacks": [handler]}))
    assert "".join(handler.tokens) == text
    info = handler.ends[0].generations[0][0].generation_info
    assert info["finish_reason"] in ("stop", "length")
    assert info["ttft_s"] > 0
    assert info["usage_metadata"]["input_tokens"] == len(llm.layout(QUESTION))


def test_leaving_a_stream_stops_the_work(llm: BlendLLM) -> None:
    stream = llm.bind(max_tokens=400, ignore_eos=True).stream(QUESTION)
    next(stream)
    stream.close()

    async def cancel() -> None:
        task = asyncio.create_task(llm.ainvoke(QUESTION, max_tokens=2000, ignore_eos=True))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 20))


def test_passages_survive_prompts_messages_and_text(
    llm: BlendLLM, fresh: TransformersEngine, documents: list[Document]
) -> None:
    prompt = BlendPrompt(system="Answer from the passages.")
    value = prompt.invoke({"context": documents, "question": QUESTION})
    expected = fresh_layout(fresh, documents)
    assert llm.layout(value).token_ids == expected.token_ids
    assert llm.layout(value.to_string()).token_ids == expected.token_ids
    assert llm.layout(value.to_messages()).token_ids == expected.token_ids
    joined = "".join(enclose(document.page_content) for document in documents) + QUESTION
    chunks = [segment for segment in llm.layout(joined).segments if segment.kind == "chunk"]
    assert [segment.text for segment in chunks] == list(FACTS.values())
    assert (prompt | llm).invoke({"context": documents, "question": QUESTION}) == fresh.generate(
        expected, max_tokens=16
    ).text


def fresh_layout(engine: TransformersEngine, documents: list[Document]) -> Any:
    from blend_rag import PromptBuilder

    builder = PromptBuilder(engine.tokenizer, system="Answer from the passages.")
    return builder.build(passages=[document.page_content for document in documents], question=QUESTION)


def test_bad_arguments_are_said(fresh: TransformersEngine, llm: BlendLLM) -> None:
    with pytest.raises(ValueError, match="temperature must be 0"):
        BlendLLM(engine=fresh, temperature=-1)
    with pytest.raises(ValueError, match="temprature"):
        BlendLLM(engine=fresh, temprature=1)
    with pytest.raises(TypeError, match="unknown argument best_of"):
        llm.invoke(QUESTION, best_of=2)
    with pytest.raises(ValueError, match="n must be"):
        llm.invoke(QUESTION, n=0)


def test_a_call_says_a_ratio_or_a_target(fresh: TransformersEngine, tmp_path: Path) -> None:
    measured = {"selector": "first-k", "ratio": 0.4, "context": "prefix", "gap_closed": 0.7, "ttft_speedup": 2.0}
    report = tmp_path / "fidelity.json"
    report.write_text(json.dumps({"model": fresh.model_name, "arms": [measured]}))
    llm = BlendLLM(engine=fresh, max_tokens=2, calibration=str(report))

    def policy(**said: Any) -> tuple[str, float]:
        info = llm.generate([QUESTION], **said).generations[0][0].generation_info
        assert info is not None
        found = info["blend_rag"]["policy"]
        return found["selector"], found["ratio"]

    assert policy() == (RecomputePolicy().selector, 0.15)
    assert policy(ratio=0.5) == (RecomputePolicy().selector, 0.5)
    assert policy(target=0.6) == ("first-k", 0.4)
    with pytest.raises(PolicyError, match=r"the best closes 0\.70"):
        policy(target=0.8)
    with pytest.raises(PolicyError, match="pass one of them"):
        policy(target=0.6, ratio=0.5)


def test_timeouts(fresh: TransformersEngine) -> None:
    llm = BlendLLM(engine=fresh, timeout=0.5, max_tokens=2000)
    with pytest.raises(TimeoutError):
        llm.invoke(QUESTION, ignore_eos=True)
    with pytest.raises(TimeoutError, match="took longer than timeout"):
        list(llm.stream(QUESTION, ignore_eos=True))


def test_caches_tell_policies_apart(fresh: TransformersEngine) -> None:
    cache = InMemoryCache()
    set_llm_cache(cache)
    try:
        for ratio in (0.0, 1.0, 1.0):
            BlendLLM(engine=fresh, max_tokens=2, policy=RecomputePolicy(ratio=ratio)).invoke(QUESTION)
        assert len(cache._cache) == 2
    finally:
        set_llm_cache(None)
