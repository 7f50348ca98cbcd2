"""A real vLLM engine in a process of its own, asked in the way a test wants to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # tests change weights in the workers

from prometheus_client import REGISTRY

from blend_rag.layout import PromptLayout
from blend_rag.vllm.request import request_parameters

CONNECTOR = {
    "kv_connector": "BlendConnector",
    "kv_connector_module_path": "blend_rag.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log-probabilities, what vLLM counts as cached, and the blend's report."""

    token_ids: list[int]
    logprobs: list[float]
    cached: int
    report: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def ask_of(layout: PromptLayout, **params: Any) -> tuple[Sequence[int], dict[str, Any]]:
    """A layout as a request with its segments."""
    return layout.token_ids, {**request_parameters(layout), **params}


class Served:
    """One engine."""

    def __init__(self, model: Path, connector: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        settings = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if connector is not None:
            transfer = {**CONNECTOR, **{name: connector.pop(name) for name in list(connector) if name in CONNECTOR}}
            settings["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": connector}
        self.llm = LLM(**settings)
        # a later engine in this process takes the names of metrics away, not the metrics
        self._collectors = [
            collector
            for collector, names in REGISTRY._collector_to_names.items()
            if any(name.startswith("vllm:") for name in names)
        ]

    def ask(
        self, *requests: tuple[Sequence[int], dict[str, Any] | None] | Sequence[int], tokens: int = 8, **sampling: Any
    ) -> list[Answer]:
        """Answers of requests made at once; each is token ids, or token ids and parameters."""
        from vllm import SamplingParams

        prompts, params = [], []
        for request in requests:
            ids, given = request if isinstance(request, tuple) and len(request) == 2 else (request, None)
            prompts.append({"prompt_token_ids": list(ids)})
            options = {"temperature": 0.0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True, **sampling}
            params.append(
                SamplingParams(**options, extra_args={"kv_transfer_params": given} if given is not None else None)
            )
        return [_answer(output) for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def metrics(self) -> dict[str, float]:
        """Values of the blend's metrics and of some of vLLM's, by name and label."""
        found: dict[str, float] = {}
        for metric in (metric for collector in self._collectors for metric in collector.collect()):
            for sample in metric.samples:
                if sample.name.endswith(("_total", "_count")):
                    labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                    name = sample.name.removeprefix("vllm:").removesuffix("_total").removesuffix("_count")
                    found[name + "".join(f" {value}" for value in labels.values())] = sample.value
        return found

    def close(self) -> None:
        """End the engine's process."""
        self.llm.llm_engine.engine_core.shutdown()

    def settle(self) -> None:
        """Wait until chunks that were new have been computed and kept."""
        for _ in range(100):
            before = self.metrics().get("blend_rag_seconds store", 0)
            self.ask([5, 6, 7], tokens=1)
            if self.metrics().get("blend_rag_seconds store", 0) == before:
                return


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    logprobs = [next(iter(step.values())).logprob for step in completion.logprobs or []]
    report = (output.kv_transfer_params or {}).get("blend_rag", {})
    return Answer(list(completion.token_ids), logprobs, output.num_cached_tokens or 0, report, completion.text)


def assert_same(left: Answer, right: Answer, tolerance: float = 1e-3) -> None:
    """Greedy tokens are equal, and their log-probabilities within a tolerance."""
    assert left.token_ids == right.token_ids
    worst = max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True))
    assert worst < tolerance, worst


def far_apart(left: Answer, right: Answer, least: float = 0.01) -> bool:
    """Whether two answers clearly come from different KV."""
    if left.token_ids != right.token_ids:
        return True
    return max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True)) > least
