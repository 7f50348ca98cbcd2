"""Time to first token in vLLM: full prefill, prefix caching and blending, interleaved in one process on one GPU.

    python benchmarks/vllm_ttft.py MODEL --tokens 2048,8192,16384,32768 --json benchmarks/results/vllm-ttft.json

Prompts are 512-token chunks, shuffled anew for every run, behind a system prompt, a question last: of the Python
language reference where the model is real, of random ids where its weights are. TTFT is the time of a whole request
with `max_tokens=1`, as a caller of `LLM.generate` sees it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that tiers can be switched

import torch
import typer

CHUNK_TOKENS = 512
SYSTEM_TOKENS = 32
QUESTION_TOKENS = 24
_LEAST_CHUNKS = 16
Row = dict[str, Any]


def start(model: str, max_tokens: int, budget: int, settings: dict[str, Any], eager: bool, dummy: bool, memory: float):
    """An engine with the connector and nothing else special."""
    from vllm import LLM

    return LLM(
        model=model,
        max_model_len=max_tokens + 256,
        max_num_batched_tokens=budget,
        gpu_memory_utilization=memory,
        enforce_eager=eager,
        dtype="bfloat16",
        load_format="dummy" if dummy else "auto",
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "BlendConnector",
            "kv_connector_module_path": "blend_rag.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        },
    )


class Prompts:
    """Prompts over shuffled chunks: of a text's ids one after the other, or of random ids."""

    def __init__(self, text_ids: list[int] | None = None, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._text_ids = list(text_ids or [])
        self.system = self._ids(SYSTEM_TOKENS)
        self._question = self._ids(QUESTION_TOKENS)
        self.chunks: list[list[int]] = []

    def _ids(self, count: int) -> list[int]:
        if len(self._text_ids) >= count:
            taken, self._text_ids = self._text_ids[:count], self._text_ids[count:]
            return taken
        return [self._rng.randrange(1000, 30000) for _ in range(count)]

    def make(self, tokens: int) -> tuple[list[int], list[list[Any]]]:
        """Ids and segments of a prompt of about `tokens` tokens in a new order."""
        count = (tokens - SYSTEM_TOKENS - QUESTION_TOKENS) // CHUNK_TOKENS + 1
        while len(self.chunks) < max(count, _LEAST_CHUNKS):
            self.chunks.append(self._ids(CHUNK_TOKENS))
        chosen = self._rng.sample(self.chunks, count)  # never the same prompt twice: that would be cached as a whole
        ids, segments = list(self.system), [["prefix", SYSTEM_TOKENS]]
        for chunk in chosen:
            ids += chunk
            segments.append(["chunk", CHUNK_TOKENS])
        return ids + self._question, [*segments, ["question", QUESTION_TOKENS]]


class Bench:
    """Runs single requests and measures them."""

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._llm = llm
        self.worker = get_kv_transfer_group().worker
        self.worker.take_stats = lambda: None  # its clocks are read here
        self.tokenizer = llm.get_tokenizer()
        self._salts = 0

    def request(self, ids: list[int], params: dict[str, Any] | None = None, fresh: bool = False, tokens: int = 1):
        """One request; `fresh` keeps vLLM's prefix cache from helping."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0 if tokens > 1 else None,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if fresh:
            self._salts += 1
            prompt["cache_salt"] = str(self._salts)
        torch.cuda.synchronize()
        began = time.perf_counter()
        [output] = self._llm.generate([prompt], sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began, output

    def warm(self, system: list[int], chunk: list[int]) -> None:
        """Have a chunk's KV computed and kept."""
        segments = [["prefix", len(system)], ["chunk", len(chunk)], ["question", 1]]
        self.request([*system, *chunk, 1], {"segments": segments, "warm": True})

    def settle(self) -> None:
        """Let new chunks be computed and kept: an engine in this process only works while it is asked something."""
        while self.worker.news() is not None:
            self.request([1, 2, 3, 4])

    def blend_seconds(self) -> float:
        """GPU time of the last blend."""
        torch.cuda.synchronize()
        found = [began.elapsed_time(ended) / 1e3 for phase, began, ended in self.worker.clocks if phase == "blend"]
        self.worker.clocks.clear()
        return found[-1] if found else 0.0


def measure(bench: Bench, prompts: Prompts, tokens: int, policies: list[tuple[str, float]], repeats: int) -> list[Row]:
    """Rows of one prompt length."""
    prompts.make(tokens)
    for chunk in prompts.chunks:
        bench.warm(prompts.system, chunk)
    arms: dict[tuple[str, str | None, float | None], list[float]] = {
        ("full", None, None): [],
        ("prefix cache", None, None): [],
    }
    inside: dict[tuple[str, str | None, float | None], list[float]] = {}
    for selector, ratio in policies:
        for tier in ("gpu", "host"):
            arms[f"blend from {tier}", selector, ratio] = []
    for repeat in range(repeats + 2):  # two rounds to warm up
        for arm, times in arms.items():
            name, selector, ratio = arm
            ids, segments = prompts.make(tokens)
            params = {"segments": segments, "selector": selector, "ratio": ratio} if selector else None
            with bench.worker.tiers.without_gpu() if name == "blend from host" else nullcontext():
                bench.blend_seconds()
                seconds, output = bench.request(ids, params, fresh=name == "full")
            if selector:
                report = output.kv_transfer_params["blend_rag"]
                tier = name.removeprefix("blend from ")
                assert report["tokens"].get(tier, 0) > 0.5 * tokens, report
            if repeat >= 2:
                times.append(seconds)
                inside.setdefault(arm, []).append(bench.blend_seconds() if selector else 0.0)
    full = statistics.median(arms["full", None, None])
    return [
        {
            "tokens": len(ids),
            "arm": name,
            "selector": selector,
            "ratio": ratio,
            "ttft_s": statistics.median(times),
            "ttft_min_s": min(times),
            "ttft_max_s": max(times),
            "speedup": full / statistics.median(times),
            "blend_s": statistics.median(inside[name, selector, ratio]) or None,
        }
        for (name, selector, ratio), times in arms.items()
    ]


_KINDS = {
    "attention": ("attention_kernel", "flash", "fmha"),
    "place stored KV": ("place_kernel",),
    "write pages": ("reshape_and_cache",),
    "matmul": ("gemm", "cutlass", "nvjet", "sm90_xmma", "splitk"),
    "copy": ("memcpy", "copy_kernel", "direct_copy", "cat", "elementwise"),
}


def profile(bench: Bench, prompts: Prompts, tokens: int, selector: str, ratio: float) -> dict[str, float]:
    """Milliseconds of GPU work by kind for one blended request, and of the whole request."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    ids, segments = prompts.make(tokens)
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        seconds, _ = bench.request(ids, {"segments": segments, "selector": selector, "ratio": ratio})
    found: dict[str, float] = {}
    for event in trace.key_averages():
        if str(event.device_type).endswith("CUDA"):
            name = event.key.lower()
            kind = next((kind for kind, marks in _KINDS.items() if any(mark in name for mark in marks)), "other")
            found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1e3
    found["GPU busy"] = sum(found.values())
    found["request (under the profiler)"] = seconds * 1e3
    return {kind: round(value, 2) for kind, value in found.items()}


def exactness(bench: Bench, prompts: Prompts, tokens: int, answer: int) -> Row:
    """R = 1 against plain vLLM: greedy tokens that agree and the largest difference of their log-probabilities."""
    ids, segments = prompts.make(tokens)
    _, plain = bench.request(ids, None, fresh=True, tokens=answer)
    _, blended = bench.request(ids, {"segments": segments, "ratio": 1.0}, tokens=answer)
    _, after = bench.request(ids, None, tokens=answer)  # must not meet blended pages
    pairs = [
        (next(iter(left.values())).logprob, right.get(token))
        for left, right, token in zip(
            plain.outputs[0].logprobs, blended.outputs[0].logprobs, plain.outputs[0].token_ids, strict=True
        )
    ]
    same = [
        sum(a == b for a, b in zip(plain.outputs[0].token_ids, other.outputs[0].token_ids, strict=True))
        for other in (blended, after)
    ]
    return {
        "tokens": len(ids),
        "answer_tokens": answer,
        "equal_tokens": same[0],
        "equal_tokens_plain_afterwards": same[1],
        "max_logprob_difference": max(abs(a - b.logprob) if b else float("inf") for a, b in pairs),
    }


def _reference(bench: Bench) -> list[int]:
    """Ids of the language reference, in the model's tokens."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids: list[int] = bench.tokenizer.encode(text, add_special_tokens=False)
    return ids


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
    tokens: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "2048,8192,16384,32768",
    selector: Annotated[str, typer.Option(help="Selectors, comma-separated.")] = "query-guided,first-k,k-deviation",
    ratio: Annotated[str, typer.Option(help="Recompute ratios, comma-separated.")] = "0.15",
    repeats: Annotated[int, typer.Option(help="Counted runs of every arm.")] = 7,
    budget: Annotated[int, typer.Option(help="max_num_batched_tokens.")] = 16384,
    gpu_bytes: Annotated[str, typer.Option(help="GPU tier.")] = "6GiB",
    memory: Annotated[float, typer.Option(help="gpu_memory_utilization.")] = 0.6,
    eager: Annotated[bool, typer.Option(help="Start without graphs, as is usual in measuring prefill.")] = True,
    dummy: Annotated[bool, typer.Option(help="Random weights: speed does not depend on them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    """Measure, check r = 1, profile, and print a table."""
    lengths = [int(part) for part in tokens.split(",")]
    policies = [(name, float(share)) for name in selector.split(",") for share in ratio.split(",")]
    settings = {"gpu_bytes": gpu_bytes, "host_bytes": "20GiB"}
    began = time.perf_counter()
    bench = Bench(start(model, max(lengths) + 1024, budget, settings, eager, dummy, memory))
    started = time.perf_counter() - began
    prompts = Prompts(None if dummy else _reference(bench))
    for _ in range(2):
        bench.request(prompts.make(min(lengths))[0], None, fresh=True, tokens=4)
    exact = exactness(bench, prompts, min(lengths), 16)
    bench.settle()
    rows = [row for length in lengths for row in measure(bench, prompts, length, policies, repeats)]
    middle = lengths[min(1, len(lengths) - 1)]
    result = {
        "model": model + (" (random weights)" if dummy else ""),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "settings": {"budget": budget, "eager": eager, "gpu_bytes": gpu_bytes, "dtype": "bfloat16"},
        "start_s": round(started, 1),
        "exactness": exact,
        "profile_tokens": middle,
        "profile_ms": {name: profile(bench, prompts, middle, name, share) for name, share in policies},
        "rows": rows,
    }
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"started in {started:.0f} s; r = 1: {exact}")
    for name, kinds in result["profile_ms"].items():
        print("profile", name, kinds)
    for row in rows:
        inside = f"blend {row['blend_s'] * 1e3:7.1f} ms" if row["blend_s"] else ""
        print(
            f"{row['tokens']:6} {row['arm']:16} {row['selector'] or '':13} {row['ratio'] or '':5} "
            f"{row['ttft_s'] * 1e3:8.1f} ms ({row['ttft_min_s'] * 1e3:.1f} to {row['ttft_max_s'] * 1e3:.1f}) "
            f"×{row['speedup']:.2f} {inside}"
        )


if __name__ == "__main__":
    typer.run(main)
