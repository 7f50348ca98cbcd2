"""vLLM under load: concurrent RAG requests by full prefill and by blending, and what a long prompt costs the others.

    python benchmarks/vllm_load.py MODEL --concurrency 1,4,16 --json benchmarks/results/vllm-load.json

Requests are shuffled 512-token chunks of a warmed pool behind a system prompt, a question last, with a short answer; as
many as `--concurrency` says are under way at any time, the arms take turns in one process. TTFT is that of a caller of
`VLLMEngine`. vLLM's prefix cache is on in both arms. In the second part four requests decode while a prompt of
`--long` tokens arrives; the gaps between their tokens until its first one are counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from blend_rag import FULL_PREFILL, Generation, PromptLayout, RecomputePolicy
from blend_rag.engines.requests import Ask, Piece
from blend_rag.engines.vllm import VLLMEngine
from blend_rag.engines.wire import request_parameters
from blend_rag.layout import Segment, SegmentKind

CHUNK_TOKENS = 512
SYSTEM_TOKENS = 32
QUESTION_TOKENS = 24
Row = dict[str, Any]


class TimedEngine(VLLMEngine):
    """Notes when tokens of the requests that are watched come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.watched: dict[tuple[int, ...], list[float]] = {}
        super().__init__(*args, **kwargs)

    async def _pieces(self, ask: Ask) -> AsyncIterator[Piece]:
        times = self.watched.get(ask.token_ids)
        async for piece in super()._pieces(ask):
            if times is not None and piece.token_ids:
                times.append(time.perf_counter())
            yield piece


class Prompts:
    """Layouts of random ids over a pool of chunks: speed does not depend on what they say."""

    def __init__(self, pool: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.system = self.ids(SYSTEM_TOKENS)
        self.chunks = [self.ids(CHUNK_TOKENS) for _ in range(pool)]

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(1000, 30000) for _ in range(count))

    def layout(self, chunks: list[tuple[int, ...]], question: int = QUESTION_TOKENS) -> PromptLayout:
        ids, segments = list(self.system), [Segment(SegmentKind.PREFIX, 0, SYSTEM_TOKENS, "")]
        for chunk in chunks:
            segments.append(Segment(SegmentKind.CHUNK, len(ids), len(ids) + len(chunk), ""))
            ids += chunk
        segments.append(Segment(SegmentKind.QUESTION, len(ids), len(ids) + question, ""))
        return PromptLayout((*ids, *self.ids(question)), tuple(segments), self.system)

    def shuffled(self, tokens: int) -> PromptLayout:
        """A prompt of about `tokens` tokens in an order not seen before."""
        return self.layout(self._rng.sample(self.chunks, tokens // CHUNK_TOKENS))


def warm(engine: TimedEngine, prompts: Prompts) -> float:
    """Have the pool's KV computed and kept; seconds."""
    began = time.perf_counter()

    async def all_chunks() -> None:
        for start in range(0, len(prompts.chunks), 8):
            layout = prompts.layout(prompts.chunks[start : start + 8], 1)
            asked = Ask(layout.token_ids, _sampling(1), request_parameters(layout, warm=True))
            told = await engine._whole(asked)
            assert told, "the connector warms"
            assert "error" not in told, told

    engine._loop.run(all_chunks())
    return time.perf_counter() - began


def _sampling(tokens: int) -> Any:
    from blend_rag import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True)


async def under_load(
    engine: TimedEngine, layouts: list[PromptLayout], concurrency: int, policy: RecomputePolicy, answer: int
) -> tuple[float, list[tuple[float, Generation]]]:
    """Answer all, so many at a time; seconds, and seconds and answer of each."""
    turn = asyncio.Semaphore(concurrency)

    async def one(layout: PromptLayout) -> tuple[float, Generation]:
        async with turn:
            began = time.perf_counter()
            found = await engine.agenerate(layout, _sampling(answer), policy=policy)
            return time.perf_counter() - began, found

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, layouts))
    return time.perf_counter() - began, list(answers)


def measure_load(
    engine: TimedEngine, prompts: Prompts, tokens: int, concurrency: int, requests: int, answer: int, repeats: int
) -> list[Row]:
    """Rows of one concurrency, an arm each; rounds of the arms take turns."""
    arms = {"full prefill": FULL_PREFILL, "connector": engine.policy}
    ttfts: dict[str, list[float]] = {name: [] for name in arms}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    whole: dict[str, list[float]] = {name: [] for name in arms}
    reused: list[float] = []
    for _ in range(repeats):
        for name, policy in arms.items():
            layouts = [prompts.shuffled(tokens) for _ in range(requests)]
            took, answers = asyncio.run(under_load(engine, layouts, concurrency, policy, answer))
            seconds[name].append(took)
            ttfts[name] += [one.report.ttft_s for _, one in answers]
            whole[name] += [lasted for lasted, _ in answers]
            if name == "connector":
                reused += [one.report.reused_tokens / one.report.prompt_tokens for _, one in answers]
    return [
        {
            "concurrency": concurrency,
            "arm": name,
            "prompt_tokens": len(layouts[0]),
            "requests": requests * repeats,
            "ttft_p50_s": _quantile(ttfts[name], 0.5),
            "ttft_p95_s": _quantile(ttfts[name], 0.95),
            "answer_p50_s": _quantile(whole[name], 0.5),
            "answer_p95_s": _quantile(whole[name], 0.95),
            "requests_per_s": requests * repeats / sum(seconds[name]),
            "reused_share": statistics.mean(reused) if name == "connector" else 0.0,
        }
        for name in arms
    ]


def measure_gaps(engine: TimedEngine, prompts: Prompts, long: int, others: int, repeats: int) -> list[Row]:
    """Gaps between tokens of decoding requests, alone and while a long prompt is on its way."""
    arms = {"nothing": None, "full prefill": FULL_PREFILL, "connector": engine.policy}
    gaps: dict[str, list[float]] = {name: [] for name in arms}
    ttfts: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, policy in arms.items():
            found, ttft = asyncio.run(_gaps_once(engine, prompts, long, others, policy))
            gaps[name] += found
            ttfts[name].append(ttft)
    return [
        {
            "arriving": name,
            "prompt_tokens": long if arms[name] else 0,
            "others": others,
            "gaps": len(gaps[name]),
            "ttft_s": statistics.median(ttfts[name]) if arms[name] else None,
            "gap_p50_s": _quantile(gaps[name], 0.5),
            "gap_p99_s": _quantile(gaps[name], 0.99),
            "gap_max_s": max(gaps[name]),
        }
        for name in arms
    ]


async def _gaps_once(
    engine: TimedEngine, prompts: Prompts, long: int, others: int, policy: RecomputePolicy | None
) -> tuple[list[float], float]:
    layouts = [prompts.layout([], 200) for _ in range(others)]
    engine.watched = {layout.token_ids: [] for layout in layouts}
    decoding = [asyncio.ensure_future(engine.agenerate(layout, _sampling(600))) for layout in layouts]
    while any(len(times) < 20 for times in engine.watched.values()):
        await asyncio.sleep(0.005)
    began = time.perf_counter()
    if policy is None:
        await asyncio.sleep(0.5)
    else:
        await engine.agenerate(prompts.shuffled(long), _sampling(1), policy=policy)
    ended = time.perf_counter()
    for task in decoding:
        task.cancel()
    await asyncio.gather(*decoding, return_exceptions=True)
    gaps = [
        later - earlier
        for times in engine.watched.values()
        for earlier, later in pairwise(times)
        if later > began and earlier < ended
    ]
    return gaps, ended - began


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def versions() -> dict[str, str]:
    """Of what was measured."""
    found = {"torch": torch.__version__}
    for name in ("vllm", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub id.")],
    tokens: Annotated[int, typer.Option(help="Prompt length.")] = 8192,
    long: Annotated[int, typer.Option(help="Length of the prompt that arrives among decoding requests.")] = 32768,
    concurrency: Annotated[str, typer.Option(help="Requests under way at once, comma-separated.")] = "1,4,16",
    requests: Annotated[int, typer.Option(help="Requests of a round for each that is under way at once.")] = 4,
    repeats: Annotated[int, typer.Option(help="Rounds of every arm.")] = 3,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    pool: Annotated[int, typer.Option(help="Chunks in the pool.")] = 96,
    budget: Annotated[int, typer.Option(help="max_num_batched_tokens.")] = 8192,
    gpu_bytes: Annotated[int, typer.Option(help="GPU tier.")] = 8 << 30,
    memory: Annotated[float, typer.Option(help="gpu_memory_utilization.")] = 0.6,
    dummy: Annotated[bool, typer.Option(help="Random weights: speed does not depend on them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    """Measure and print two tables."""
    options: dict[str, Any] = {"load_format": "dummy"} if dummy else {}
    with TimedEngine(
        model,
        dtype="bfloat16",
        max_model_len=long + 1024,
        gpu_bytes=gpu_bytes,
        host_bytes=20 << 30,
        gpu_memory_utilization=memory,
        max_num_batched_tokens=budget,
        **options,
    ) as engine:
        prompts = Prompts(pool)
        warm_s = warm(engine, prompts)
        for policy in (FULL_PREFILL, engine.policy, FULL_PREFILL, engine.policy):  # whatever is done on first use
            asyncio.run(under_load(engine, [prompts.shuffled(tokens) for _ in range(4)], 4, policy, 8))
        loads = [
            row
            for count in map(int, concurrency.split(","))
            for row in measure_load(engine, prompts, tokens, count, requests * max(count, 2), answer, repeats)
        ]
        for policy in (FULL_PREFILL, engine.policy):
            engine.generate(prompts.shuffled(long), _sampling(1), policy=policy)
        gaps = measure_gaps(engine, prompts, long, 4, repeats + 2)
    result = {
        "model": model + (" (random weights)" if dummy else ""),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "settings": {"budget": budget, "gpu_bytes": gpu_bytes, "dtype": "bfloat16", "answer_tokens": answer},
        "warmed": {"tokens": pool * CHUNK_TOKENS, "seconds": round(warm_s, 2)},
        "load": loads,
        "gaps": gaps,
    }
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"warmed {pool * CHUNK_TOKENS} tokens in {warm_s:.1f} s")
    for row in loads:
        print(
            f"{row['concurrency']:3} at once  {row['arm']:13} TTFT p50 {row['ttft_p50_s'] * 1e3:7.0f} ms  "
            f"p95 {row['ttft_p95_s'] * 1e3:7.0f} ms  whole answer p50 {row['answer_p50_s']:.2f} s  "
            f"p95 {row['answer_p95_s']:.2f} s  {row['requests_per_s']:6.2f} requests/s  "
            f"reused {row['reused_share']:.2f}"
        )
    for row in gaps:
        ttft = f"TTFT {row['ttft_s'] * 1e3:.0f} ms" if row["ttft_s"] else ""
        print(
            f"{row['arriving']:13} arriving: gaps p50 {row['gap_p50_s'] * 1e3:.1f} ms  "
            f"p99 {row['gap_p99_s'] * 1e3:.1f} ms  max {row['gap_max_s'] * 1e3:.1f} ms  ({row['gaps']})  {ttft}"
        )


if __name__ == "__main__":
    typer.run(main)
