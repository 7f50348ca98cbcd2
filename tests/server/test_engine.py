"""`ServerEngine` against a real server: the embedded engine's answers, streams, faults, commands."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blend_rag import FULL_PREFILL, Passage, PromptBuilder, RecomputePolicy, load_engine
from blend_rag.engines.base import Generation, TokenFate, chunks_with_kv
from blend_rag.engines.server import ServerEngine
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import (
    BlendRagError,
    ModelError,
    PolicyError,
    PromptTooLongError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from tests.server.conftest import KEY
from tests.server.processes import Proxy, VLLMServer

POLICIES = [
    RecomputePolicy(),
    RecomputePolicy(ratio=0.3, selector="first-k"),
    RecomputePolicy(selector="k-deviation"),
    RecomputePolicy(ratio=0.0, context="alone"),
    RecomputePolicy(ratio=1.0),
    FULL_PREFILL,
]


def fates(answer: Generation) -> list[TokenFate]:
    """Fate of every token, with hot ones as reused: what an engine happens to hold is its own."""
    return [TokenFate.REUSED if fate is TokenFate.HOT else fate for _, fate in answer.report.tokens]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.selector}-{policy.ratio}-{policy.reuse}")
def test_answers_and_reports_are_the_embedded_engines(
    remote: ServerEngine,
    engine: TransformersEngine,
    prompts: PromptBuilder,
    passages: list[Passage],
    policy: RecomputePolicy,
) -> None:
    shown = passages[3:0:-1]
    layout = prompts.build(passages=shown, question="What is a string literal?")
    for one in (remote, engine):
        one.warm(prompts, passages[1:4], context=policy.context)
    engine.clear_hot()
    here = engine.generate(layout, max_tokens=24, policy=policy)
    there = remote.generate(layout, max_tokens=24, policy=policy)
    assert there.token_ids == here.token_ids
    assert there.text == here.text
    assert there.finish_reason == here.finish_reason
    if policy.selector != "k-deviation":  # on the last digits of two libraries' layers, ties fall either way
        start = layout.segments[0].end if policy.ratio == 1.0 else 0  # nor does vLLM's half take a stored prefix then
        assert fates(there)[start:] == fates(here)[start:]
    assert there.report.exact == here.report.exact
    assert there.report.misses == here.report.misses
    assert there.report.recomputed_tokens == here.report.recomputed_tokens
    assert [one.context for one in there.report.segments] == [one.context for one in here.report.segments]
    assert "".join(text for text, _ in there.report.tokens) == "".join(text for text, _ in here.report.tokens)
    assert there.report.ttft_s > 0


def test_the_servers_policy_and_length_are_the_engines(remote: ServerEngine, passages: list[Passage]) -> None:
    assert remote.policy == RecomputePolicy()
    assert remote.model_name == "smollm2"
    assert remote.max_model_len == 2048
    builder = PromptBuilder(remote.tokenizer, system="S")
    with pytest.raises(PromptTooLongError, match=r"more than the model's 2,048"):
        remote.generate(builder.build(passages=passages[:30], question="Why?"))


def test_streams_come_in_pieces_and_end_with_the_whole(
    remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[4:7], question="What is this about?")
    remote.warm(prompts, passages[4:7])
    began = time.perf_counter()
    pieces, times = [], []
    for piece in remote.stream(layout, max_tokens=60, ignore_eos=True):
        pieces.append(piece)
        times.append(time.perf_counter() - began)
    shown = [piece for piece in pieces if piece.text]
    assert len(shown) > 20
    assert times[0] < times[-1] / 2
    whole = pieces[-1].generation
    assert whole is not None
    assert whole.text == "".join(piece.text for piece in pieces)
    assert whole.report.segments
    assert whole.report.prompt_tokens == len(layout)
    assert not [one.reason for one in whole.report.segments if one.reason == "not reported"]

    async def collect() -> list[str]:
        return [piece.text async for piece in remote.astream(layout, max_tokens=60, ignore_eos=True)]

    assert "".join(asyncio.run(collect())) == whole.text


def test_stop_strings_end_an_answer_as_in_the_embedded_engine(
    remote: ServerEngine, engine: TransformersEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[7:9], question="What is this about?")
    remote.warm(prompts, passages[7:9])
    engine.warm(prompts, passages[7:9])
    whole = remote.generate(layout, max_tokens=40, ignore_eos=True)
    stop = whole.text.split()[5]
    for one in (remote, engine):
        cut = one.generate(layout, max_tokens=40, ignore_eos=True, stop=(stop,))
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert one is engine or cut.report.misses == {}, "a stopped request's report is asked for"
        text = "".join(piece.text for piece in one.stream(layout, max_tokens=40, ignore_eos=True, stop=(stop,)))
        assert text == cut.text


def test_seeds_make_samples_repeatable_and_rows_differ(remote: ServerEngine, prompts: PromptBuilder) -> None:
    layout = prompts.build(passages=["A list keeps its items in order."], question="Tell me a story.")
    first = [answer.text for answer in remote.generate([layout] * 3, max_tokens=16, temperature=1.0, seed=7)]
    again = [answer.text for answer in remote.generate([layout] * 3, max_tokens=16, temperature=1.0, seed=7)]
    assert first == again
    assert len(set(first)) == 3


def test_eight_clients_at_once(server: VLLMServer, prompts: PromptBuilder, passages: list[Passage]) -> None:
    layouts = [prompts.build(passages=passages[n : n + 3], question=f"What is number {n}?") for n in range(10, 18)]
    with ServerEngine(server.url, api_key=KEY) as one:
        one.warm(prompts, passages[10:21])
        alone = [one.generate(layout, max_tokens=8, policy=RecomputePolicy(ratio=1.0)).token_ids for layout in layouts]

    def ask(number: int) -> list[tuple[int, ...]]:
        with ServerEngine(server.url, api_key=KEY) as mine:
            turned = layouts[number:] + layouts[:number]
            answers = mine.generate(turned, max_tokens=8, policy=RecomputePolicy(ratio=1.0))
            assert all(not answer.report.misses for answer in answers)
            return [answer.token_ids for answer in answers]

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(ask, range(8))):
            assert found == alone[number:] + alone[:number]


# Warming, looking up, forgetting


def test_warming_skips_what_is_there_and_lookup_computes_nothing(
    server: VLLMServer, remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    some = passages[30:50]
    layout = prompts.build(passages=some[:4], question="Why?")
    assert chunks_with_kv(layout, remote.lookup(layout)) == [False] * 4
    assert {one.reason for one in remote.lookup(layout) if one.kind == "chunk"} == {"never warmed"}
    first = remote.warm(prompts, some[:10])
    assert (first.computed, first.present, first.refused) == (10, 0, ())
    computed = server.metric("prompt_tokens")
    second = remote.warm(prompts, some)
    assert (second.computed, second.present, second.chunks) == (10, 10, 20)
    third = remote.warm(prompts, some)
    assert (third.computed, third.present, third.tokens_computed) == (0, 20, 0)
    tokens = server.metric("prompt_tokens")
    assert chunks_with_kv(layout, asyncio.run(remote.alookup(layout))) == [True] * 4
    assert server.metric("prompt_tokens") - tokens == 2, "a command's own prompt"
    assert computed > 0


def test_other_prefixes_and_documents_are_told_apart(
    remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    remote.warm(prompts, passages[50:52])
    other = PromptBuilder(remote.tokenizer, system="Another system text.")
    found = remote.lookup(other.build(passages=passages[50:52], question="Why?"))
    assert {one.reason for one in found if one.kind == "chunk"} <= {"other prefix", "never warmed"}
    changed = Passage(passages[50].text + " changed", document=passages[50].document)
    [report] = [one for one in remote.lookup(prompts.build(passages=[changed], question="?")) if one.kind == "chunk"]
    assert report.reason in ("text differs from warmed", "never warmed")


def test_forgetting_a_document_deletes_what_no_other_uses(
    remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    shared = Passage(passages[53].text, document="other")
    remote.warm(prompts, [passages[52], passages[53], shared])
    layout = prompts.build(passages=[passages[52], shared], question="Why?")
    remote.forget_document("document 52")
    assert asyncio.run(remote.aforget_document("document 53")) == 0
    answer = remote.generate(layout, max_tokens=2, policy=RecomputePolicy(ratio=0.5))
    chunks = [one for one in answer.report.segments if one.kind == "chunk"]
    assert chunks[1].reason is None
    assert chunks[0].reason is None or chunks[0].computed == chunks[0].tokens


def test_refused_requests_say_why_and_are_still_answered(
    remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[:2], question="What is it?")
    full = remote.generate(layout, max_tokens=8, policy=FULL_PREFILL)
    remote.namespace = "somebody else's"
    answer = remote.generate(layout, max_tokens=8)
    assert answer.token_ids == full.token_ids
    assert answer.report.reused_tokens == 0
    [reason] = answer.report.misses
    assert "not this server's" in reason
    with pytest.raises(ServerError, match="not this server's"):
        remote.lookup(layout)
    with pytest.raises(PolicyError, match="research"):
        remote.generate(layout, policy=RecomputePolicy(selector="oracle"))


# Faults


def test_keys_are_wanted(server: VLLMServer) -> None:
    for key in (None, "wrong"):
        with pytest.raises(ServerError, match="refuses the API key"):
            ServerEngine(server.url, api_key=key)


def test_no_server_is_said_so(proxy: Proxy) -> None:
    proxy.close()
    with pytest.raises(ServerUnreachableError, match="is the server running"):
        ServerEngine(proxy.url, max_retries=1)
    with pytest.raises(BlendRagError, match="there is no engine"):
        load_engine(engine="vlm")
    with pytest.raises(PolicyError, match="keeps the KV"):
        load_engine(engine=proxy.url, store="memory://")


def test_a_server_without_the_connector_is_said_so(proxy: Proxy) -> None:
    proxy.after = lambda path, answer: {name: value for name, value in answer.items() if name != "kv_transfer_params"}
    with pytest.raises(ServerError, match="runs without blend-rag's connector: start it with `blend-rag serve"):
        ServerEngine(proxy.url, api_key=KEY)


def test_another_tokenizer_is_refused(server: VLLMServer, tmp_path: Path) -> None:
    from tests.tokenizers_for_tests import TOKENIZERS

    next(iter(TOKENIZERS.values()))().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="pass the served model's folder"):
        ServerEngine(server.url, tmp_path, api_key=KEY)
    with pytest.raises(ServerError, match="serves smollm2, not gpt"):
        ServerEngine(server.url, api_key=KEY, served_model="gpt")


def test_an_overloaded_server_is_asked_again(proxy: Proxy, prompts: PromptBuilder) -> None:
    layout = prompts.build(passages=["A tuple cannot be changed."], question="Can it be changed?")
    with ServerEngine(proxy.url, api_key=KEY) as engine:
        refusals = [503, 429]
        proxy.before = lambda path, body: refusals.pop() if refusals else None
        assert engine.generate(layout, max_tokens=1).token_ids
        assert not refusals
        proxy.before = lambda path, body: 400
        with pytest.raises(ServerError, match="played by the proxy") as caught:
            engine.generate(layout, max_tokens=1)
        assert not isinstance(caught.value, ServerUnreachableError)


def test_a_report_that_another_server_of_a_router_has_is_missed_in_words(
    proxy: Proxy, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[:2], question="What is it?")
    with ServerEngine(proxy.url, api_key=KEY) as engine:
        right = engine.generate(layout, max_tokens=6)
        (first, answered), (second, reported) = proxy.sessions[-2:]
        assert {first, second} == {"", "report"}
        assert answered == reported, "a router that hashes on it sends both to one server"
        proxy.before = lambda path, body: 503 if body.get("kv_transfer_params", {}).get("command") else None
        answer = engine.generate(layout, max_tokens=6)
    assert answer.token_ids == right.token_ids
    assert answer.report.misses == {"not reported": 2}


def test_silence_is_not_waited_for_for_ever(proxy: Proxy, prompts: PromptBuilder) -> None:
    layout = prompts.build(passages=["A tuple cannot be changed."], question="Can it be changed?")
    with ServerEngine(proxy.url, api_key=KEY, timeout=2.0) as engine:

        def sleepy(path: str, body: dict) -> int:
            time.sleep(3)
            return 200

        proxy.before = sleepy
        with pytest.raises(ServerTimeoutError, match="longer timeout="):
            engine.generate(layout, max_tokens=1)


def test_a_client_that_hangs_up_frees_the_server(
    server: VLLMServer, remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[:2], question="What is it?")
    right = remote.generate(layout, max_tokens=4).token_ids
    stream = remote.stream(layout, max_tokens=1500, ignore_eos=True)
    next(stream)
    stream.close()

    async def give_up() -> None:
        work = asyncio.ensure_future(remote.agenerate(layout, max_tokens=1500, ignore_eos=True))
        await asyncio.sleep(1.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(give_up())
    deadline = time.monotonic() + 10
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.metric("num_requests_running") == 0
    assert remote.generate(layout, max_tokens=4).token_ids == right


# kill -9


def test_a_server_killed_while_answering_is_said_so_or_waited_for(
    mortal: VLLMServer, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    layout = prompts.build(passages=passages[60:62], question="What is it?")
    with ServerEngine(mortal.url, max_retries=2) as hasty, ServerEngine(mortal.url, max_retries=30) as patient:
        patient.warm(prompts, passages[60:62])
        right = patient.generate(layout, max_tokens=300, ignore_eos=True).token_ids
        stream = hasty.stream(layout, max_tokens=1500, ignore_eos=True)
        for _ in range(3):
            next(stream)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(patient.generate, layout, max_tokens=300, ignore_eos=True)
            time.sleep(1.0)
            mortal.kill()
            with pytest.raises(ServerError, match="broken off"):
                list(stream)
            with pytest.raises(ServerUnreachableError):
                hasty.generate(layout, max_tokens=300)
            mortal.start()
            assert waiting.result().token_ids == right, "asked again once the server was back"
        answer = hasty.generate(layout, max_tokens=300, ignore_eos=True)
        assert answer.token_ids == right


def test_warming_a_thousand_chunks_survives_kill_9_and_another_server_finds_them(
    mortal: VLLMServer, remote: ServerEngine, prompts: PromptBuilder, passages: list[Passage]
) -> None:
    words = " ".join(passage.text for passage in passages).split()
    chunks = [f"{number}. " + " ".join(words[9 * number : 9 * number + 9]) for number in range(1000)]
    documents = [Passage(text, document=f"chunk {number}") for number, text in enumerate(chunks)]
    mortal.wait()
    with ServerEngine(mortal.url, max_concurrency=4) as engine:
        killed = threading.Event()

        def kill_in_the_middle() -> None:
            deadline = time.monotonic() + 60
            while mortal.metric("blend_rag_requests", outcome="warmed") < 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            mortal.kill()
            killed.set()
            mortal.start()

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        report = engine.warm(prompts, documents)
        killer.join()
        assert killed.is_set()
        assert report.refused == ()
        assert report.computed + report.present == 1000
        again = engine.warm(prompts, documents)
        assert (again.computed, again.present) == (0, 1000)
    elsewhere = remote.warm(prompts, documents)
    assert (elsewhere.computed, elsewhere.present) == (0, 1000), "the second server finds them in the store"
    answer = remote.generate(prompts.build(passages=documents[500:508], question="Why?"), max_tokens=2)
    assert answer.report.misses == {}
