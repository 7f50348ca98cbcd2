"""What the connector counts, and the Prometheus metrics it becomes on vLLM's `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = {
    "requests": ("outcome", "Requests by what became of them."),
    "tokens": ("outcome", "Prompt tokens of blended requests: reused by tier, recomputed, computed."),
    "hits": ("tier", "Chunks whose KV was found, by tier."),
    "misses": ("reason", "Chunks whose KV was not found, by reason."),
    "bytes": ("direction", "Bytes of chunk KV loaded from a store and kept in one."),
}
_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass
class BlendStats(KVConnectorStats):
    """Counts since the last report: `data` maps a metric to label values, and phases to seconds."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {name: {} for name in (*_COUNTERS, "seconds")}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def add(self, metric: str, label: str, amount: float = 1) -> None:
        """Count."""
        counts = self.data[metric]
        counts[label] = counts.get(label, 0) + amount

    def count_request(self, outcome: str) -> None:
        """Count a request by what became of it."""
        self.add("requests", outcome)

    def time(self, phase: str, seconds: Iterable[float]) -> None:
        """Note how long a phase took."""
        self.data["seconds"].setdefault(phase, []).extend(seconds)

    def aggregate(self, other: KVConnectorStats) -> BlendStats:
        """Both together."""
        for metric, values in other.data.items():
            for label, value in values.items():
                if metric == "seconds":
                    self.time(label, value)
                else:
                    self.add(metric, label, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the log."""
        found: dict[str, int | float] = {}
        for metric, values in self.data.items():
            for label, value in values.items():
                found[f"{metric} {label}"] = round(sum(value), 4) if metric == "seconds" else value
        return found

    def take(self) -> BlendStats | None:
        """What was counted, and begin anew; None if nothing was."""
        if self.is_empty():
            return None
        taken = BlendStats(data=self.data)
        self.reset()
        return taken


class BlendPrometheus(KVConnectorPromMetrics):
    """`vllm:blend_rag_*` counters and a histogram of seconds."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(name=f"vllm:blend_rag_{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in _COUNTERS.items()
        }
        self._seconds = self._histogram_cls(
            name="vllm:blend_rag_seconds",
            documentation="Seconds of a phase: load (waiting for the store), blend (computing), store (keeping).",
            buckets=list(_SECONDS_BUCKETS),
            labelnames=[*labelnames, "phase"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        labels = self._labels[engine_idx]
        for name, counter in self._counters.items():
            for label, amount in transfer_stats_data.get(name, {}).items():
                counter.labels(*labels, label).inc(amount)
        for phase, seconds in transfer_stats_data.get("seconds", {}).items():
            for value in seconds:
                self._seconds.labels(*labels, phase).observe(value)
