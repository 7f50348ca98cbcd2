"""`VLLMEngine`: vLLM in this process behind the Engine protocol, and LangChain over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from langchain_core.documents import Document

from blend_rag import FULL_PREFILL, MemoryStore, PromptBuilder, RecomputePolicy, SamplingParams, load_engine
from blend_rag.engines.vllm import VLLMEngine, vllm_sampling
from blend_rag.errors import ModelError, PolicyError, ServerError
from langchain_blend_rag import BlendPrompt, ChatBlend, Warmer
from tests.vllm.serving import Served


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatBlend]:
    """LangChain's chat model, which starts the engine by its name."""
    options = {"max_model_len": 2048, "host_bytes": 1 << 30, "enforce_eager": True, "block_size": 32}
    with closing(ChatBlend(engine="vllm", engine_options=options, max_tokens=8)) as chat:
        yield chat


@pytest.fixture(scope="module")
def engine(chat: ChatBlend) -> VLLMEngine:
    found: VLLMEngine = chat.engine
    return found


def test_answers_are_those_of_plain_vllm_and_of_the_embedded_engine(
    engine: VLLMEngine, plain: Served, prompts: PromptBuilder, texts: list[str], embedded: dict
) -> None:
    layout = prompts.build(passages=texts[30:33], question="What is a keyword?")
    engine.warm(prompts, texts[30:33])
    for policy in (RecomputePolicy(ratio=1.0), FULL_PREFILL):
        answer = engine.generate(layout, max_tokens=8, ignore_eos=True, policy=policy)
        assert list(answer.token_ids) == plain.ask(layout.token_ids)[0].token_ids
    for selector, expected in embedded.items():
        answer = engine.generate(layout, max_tokens=8, ignore_eos=True, policy=RecomputePolicy(selector=selector))
        assert list(answer.token_ids) == expected["token_ids"]


def test_batches_streams_threads_and_tasks_agree(engine: VLLMEngine, prompts: PromptBuilder, texts: list[str]) -> None:
    layouts = [prompts.build(passages=texts[n : n + 2], question=f"What is {n}?") for n in range(4)]
    engine.warm(prompts, texts[:6])
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    batch = [answer.text for answer in engine.generate(layouts, sampling)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda layout: engine.generate(layout, sampling).text, layouts)) == batch
    pieces = list(engine.stream(layouts[0], sampling))
    assert len([piece for piece in pieces if piece.text]) > 3
    assert "".join(piece.text for piece in pieces) == batch[0]
    assert pieces[-1].generation is not None
    assert pieces[-1].generation.report.misses == {}

    async def tasks() -> list[str]:
        return [answer.text for answer in await asyncio.gather(*(engine.agenerate(one, sampling) for one in layouts))]

    assert asyncio.run(tasks()) == batch


def test_stop_strings_leave_the_report(engine: VLLMEngine, prompts: PromptBuilder, texts: list[str]) -> None:
    layout = prompts.build(passages=texts[0:2], question="What is 0?")
    whole = engine.generate(layout, max_tokens=12, ignore_eos=True)
    stop = whole.text.split()[2]
    cut = engine.generate(layout, max_tokens=12, ignore_eos=True, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.report.misses == {}
    assert cut.report.reused_tokens > 100


def test_a_stream_that_is_closed_leaves_nothing_running(
    engine: VLLMEngine, prompts: PromptBuilder, texts: list[str]
) -> None:
    layout = prompts.build(passages=texts[0:2], question="What is 0?")
    stream = engine.stream(layout, max_tokens=1000, ignore_eos=True)
    next(stream)
    stream.close()
    for _ in range(100):
        if not engine._llm.output_processor.has_unfinished_requests():
            break
        engine.generate(layout, max_tokens=1)
    assert not engine._llm.output_processor.has_unfinished_requests()


def test_warming_looking_up_and_forgetting(engine: VLLMEngine, prompts: PromptBuilder, texts: list[str]) -> None:
    report = engine.warm(prompts, texts[40:44])
    assert (report.computed, report.present) == (4, 0)
    assert engine.warm(prompts, texts[40:44]).present == 4
    layout = prompts.build(passages=texts[40:44], question="?")
    assert all(one.reused == one.tokens for one in engine.lookup(layout) if one.kind == "chunk")
    assert engine.forget_document("nobody's") == 0


def test_langchain_takes_it_unchanged(chat: ChatBlend, texts: list[str]) -> None:
    documents = [Document(text, id=f"document {number}") for number, text in enumerate(texts[45:49])]
    prompt = BlendPrompt(system="Answer from the passages.", llm=chat)
    warmer = Warmer(chat, prompt)
    warmer.warm(documents)
    assert warmer.have_kv(documents) == [True] * 4
    answer = (prompt | chat).invoke({"context": documents[::-1], "question": "Which?"})
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 200
    assert chat.profile["max_input_tokens"] == 2048
    assert len(chat.batch(["One?", "Two?", "Three?"])) == 3


def test_a_request_vllm_refuses_is_an_error_in_words(engine: VLLMEngine, prompts: PromptBuilder) -> None:
    layout = prompts.build(passages=["One."], question="What?")
    outside = replace(layout, token_ids=(*layout.token_ids[:-1], 10**7))
    with pytest.raises(ServerError, match="vLLM does not answer"):
        engine.generate(outside, max_tokens=1, policy=FULL_PREFILL)


def test_senseless_arguments_are_refused_before_vllm_starts(tmp_path) -> None:
    with pytest.raises(PolicyError, match="pass its URL"):
        load_engine(engine="vllm", store=MemoryStore())
    with pytest.raises(PolicyError, match="research"):
        load_engine(engine="vllm", policy=RecomputePolicy(selector="oracle"))
    with pytest.raises(ModelError, match="there is no model"):
        load_engine(tmp_path / "nothing", engine="vllm")


def test_sampling_parameters_are_those_of_the_installed_vllm() -> None:
    import vllm

    found = vllm_sampling(
        vllm, SamplingParams(max_tokens=3, temperature=1.0, top_k=5, seed=1, stop=("x",)), {"segments": []}
    )
    assert (found.max_tokens, found.top_k, found.seed, found.stop) == (3, 5, 1, ["x"])

    class Narrow:
        __struct_fields__ = ("max_tokens", "temperature", "output_kind", "extra_args")

        def __init__(self, **given: object) -> None:
            self.given = given

    old = SimpleNamespace(SamplingParams=Narrow, sampling_params=vllm.sampling_params, __version__="0.1")
    assert set(vllm_sampling(old, SamplingParams(max_tokens=3), {}).given) == set(Narrow.__struct_fields__)
    with pytest.raises(PolicyError, match="has no sampling parameter seed"):
        vllm_sampling(old, SamplingParams(seed=3), {})
