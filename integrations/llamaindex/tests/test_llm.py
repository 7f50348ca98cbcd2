"""The LLM: calls and their twins, hooks, usage, events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import LLM, ChatMessage, CustomLLM, ImageBlock
from llama_index.core.prompts import PromptTemplate

from blend_rag import RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PolicyError, PromptError
from llama_index.llms.blend_rag import BlendLLM, BlendReuseEvent
from tests.conftest import QUESTION, SYSTEM

ROLES = ("<|im_start|>", "<|im_end|>")


def messages() -> list[ChatMessage]:
    return [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]


def shown(llm: BlendLLM, layout: Any) -> str:
    return str(llm.engine.tokenizer.decode(layout.token_ids))


def test_class_order() -> None:
    names = [base.__name__ for base in BlendLLM.__mro__]
    assert BaseLLM.__name__ in names
    assert LLM in BlendLLM.__mro__
    assert CustomLLM not in BlendLLM.__mro__


def test_every_call_and_its_twin_give_the_same(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm()
    text = llm.complete(QUESTION).text
    streamed = list(llm.stream_complete(QUESTION))
    assert "".join(piece.delta for piece in streamed) == streamed[-1].text == text
    assert len(streamed) > 3
    chat = llm.chat(messages()).message.content
    pieces = list(llm.stream_chat(messages()))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == chat

    async def twins() -> list[Any]:
        return [
            (await llm.acomplete(QUESTION)).text,
            "".join([piece.delta async for piece in await llm.astream_complete(QUESTION)]),
            (await llm.achat(messages())).message.content,
            "".join([piece.delta async for piece in await llm.astream_chat(messages())]),
        ]

    assert asyncio.run(twins()) == [text, text, chat, chat]


def test_sampling_is_the_same_sync_and_async(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm(temperature=1.0, seed=7, top_p=0.9)
    assert llm.complete(QUESTION).text == asyncio.run(llm.acomplete(QUESTION)).text
    assert llm.complete(QUESTION, seed=8).text != llm.complete(QUESTION).text


def test_async_calls_do_not_hold_up_the_loop(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm()

    async def count() -> int:
        task = asyncio.create_task(llm.acomplete(QUESTION, max_tokens=60, ignore_eos=True))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.005)
            turns += 1
        return turns

    assert asyncio.run(count()) > 10


def test_streams_come_piece_by_piece(make_llm: Callable[..., BlendLLM]) -> None:
    started = time.perf_counter()
    times = [
        time.perf_counter() - started for _ in make_llm().stream_complete(QUESTION, max_tokens=24, ignore_eos=True)
    ]
    assert times[0] < times[-1] / 2


def test_the_chat_template_and_the_system_prompt_are_applied(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm(system_prompt=SYSTEM)
    text = shown(llm, llm.completion_layout(QUESTION))
    assert text == shown(llm, llm.chat_layout(messages()))
    assert f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n" in text
    assert llm.predict(PromptTemplate("{q}"), q=QUESTION) == llm.complete(QUESTION).text


def test_hooks_are_called_and_texts_stay_literal(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm(
        completion_to_prompt=lambda prompt: f"SENTINEL<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
        messages_to_prompt=lambda told: "CHAT " + "".join(f"[{one.role.value}] {one.content}\n" for one in told),
    )
    layout = llm.completion_layout("What is <|im_end|>?")
    assert shown(llm, layout) == "SENTINEL<|im_start|>user\nWhat is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
    ids = [llm.engine.tokenizer.convert_tokens_to_ids(role) for role in ROLES]
    assert [layout.token_ids.count(role) for role in ids] == [2, 1], "the question's own stays text"
    assert shown(llm, llm.chat_layout(messages())) == f"CHAT [system] {SYSTEM}\n[user] {QUESTION}\n"
    assert llm.complete(QUESTION).text
    broken = make_llm(completion_to_prompt=lambda prompt: prompt[:3])
    with pytest.raises(PromptError, match="drops, repeats or changes"):
        broken.complete(QUESTION)


def test_usage_reaches_raw_and_the_token_counter(make_llm: Callable[..., BlendLLM]) -> None:
    counter = TokenCountingHandler()
    llm = make_llm(callback_manager=CallbackManager([counter]))
    answers = [llm.complete(QUESTION), llm.chat(messages()), list(llm.stream_complete(QUESTION))[-1]]
    for answer in answers:
        usage = answer.raw["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        assert answer.raw["ttft_s"] > 0
    assert answers[0].raw["usage"]["prompt_tokens"] == len(llm.completion_layout(QUESTION))
    assert counter.prompt_llm_token_count == sum(answer.raw["usage"]["prompt_tokens"] for answer in answers)
    assert counter.completion_llm_token_count == sum(answer.raw["usage"]["completion_tokens"] for answer in answers)


class Events(BaseEventHandler):
    seen: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)


def test_events_tell_ttft_and_reuse(make_llm: Callable[..., BlendLLM]) -> None:
    handler = Events()
    root = get_dispatcher()
    root.add_event_handler(handler)
    try:
        make_llm().complete(QUESTION)
    finally:
        root.event_handlers.remove(handler)
    names = [event.class_name() for event in handler.seen]
    assert names.index("LLMCompletionStartEvent") < names.index("BlendReuseEvent")
    assert "LLMCompletionEndEvent" in names
    [event] = [event for event in handler.seen if isinstance(event, BlendReuseEvent)]
    assert event.ttft_s > 0
    assert event.report["prompt_tokens"] > 0


def test_metadata_comes_from_the_engine(make_llm: Callable[..., BlendLLM]) -> None:
    llm = make_llm()
    assert llm.metadata.context_window == llm.engine.max_model_len
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == llm.engine.model_name
    assert llm.metadata.num_output == 16


def test_settings_survive_serialisation(make_llm: Callable[..., BlendLLM], fresh: TransformersEngine) -> None:
    llm = make_llm(temperature=0.5, stop=["x"], system_prompt=SYSTEM)
    data = llm.to_dict()
    assert "engine" not in data
    again = BlendLLM(engine=fresh, **{name: value for name, value in data.items() if name in BlendLLM.model_fields})
    assert again.to_dict() == data


def test_stop_strings_and_bad_arguments(make_llm: Callable[..., BlendLLM]) -> None:
    whole = make_llm().complete(QUESTION).text
    word = whole.split()[3]
    assert make_llm(stop=[word]).complete(QUESTION).text == whole.partition(word)[0]
    assert make_llm().complete(QUESTION, stop=[word]).text == whole.partition(word)[0]
    with pytest.raises(ValueError, match="temperature"):
        make_llm(temperature=-1)
    with pytest.raises(TypeError, match="unknown argument best_of"):
        make_llm().complete(QUESTION, best_of=2)
    with pytest.raises(PromptError, match="text alone"):
        make_llm().chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])


def test_a_call_says_a_ratio_or_a_target(
    make_llm: Callable[..., BlendLLM], fresh: TransformersEngine, tmp_path: Path
) -> None:
    measured = {"selector": "first-k", "ratio": 0.4, "context": "prefix", "gap_closed": 0.7, "ttft_speedup": 2.0}
    report = tmp_path / "fidelity.json"
    report.write_text(json.dumps({"model": fresh.model_name, "arms": [measured]}))
    llm = make_llm(max_tokens=2, calibration=str(report))

    def policy(**said: float) -> tuple[str, float]:
        found = llm.complete(QUESTION, **said).raw["blend_rag"]["policy"]
        return found["selector"], found["ratio"]

    assert policy() == (RecomputePolicy().selector, 0.15)
    assert policy(ratio=0.5) == (RecomputePolicy().selector, 0.5)
    assert policy(target=0.6) == ("first-k", 0.4)
    with pytest.raises(PolicyError, match=r"the best closes 0\.70"):
        policy(target=0.8)


def test_an_engine_loaded_here_is_closed_here(make_llm: Callable[..., BlendLLM]) -> None:
    with BlendLLM(max_tokens=2) as llm:
        assert llm.complete("Hello").text
    with pytest.raises(Exception, match="closed"):
        llm.complete("Hello")
    given = make_llm()
    given.close()
    assert given.complete("Hello").text
