"""What scheduler and workers of the connector tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from blend_rag.vllm.request import BlendRequest

Report = dict[str, Any]
"""How a request was blended, as plain data; `error` holds the reason where it was not, and `verify` how many of its
tokens the workers wait to compare."""


ANY_PAGE = -1
"""Among pages a step fills: some that are not named."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to blend into pages of vLLM's cache.

    Attributes:
        request_id: vLLM's.
        request: what to blend.
        block_ids: the request's pages, first token first.
        cached_tokens: leading tokens whose pages vLLM's prefix cache supplied; they are read, never written.
    """

    request_id: str
    request: BlendRequest
    block_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Pages that vLLM itself has filled with a request whose KV the workers have computed too."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """From the scheduler.

    Attributes:
        jobs: requests to begin.
        gone: requests that have ended.
        filling: pages that this very step fills.
        verify: pages to compare.
        forget: caches were reset, as before new weights are loaded: forget KV in memory and look at the weights.
    """

    jobs: list[Job] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    filling: set[int] = field(default_factory=set)
    verify: list[Verification] = field(default_factory=list)
    forget: bool = False


@dataclass
class StepNews(KVConnectorWorkerMetadata):
    """From a worker: reports by request id, and whether there is work left that no request waits for."""

    reports: dict[str, Report] = field(default_factory=dict)
    unfinished: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepNews:
        """News of two ranks; they agree, but for a failure that only one saw."""
        assert isinstance(other, StepNews)
        reports = {**other.reports, **self.reports}
        reports |= {name: report for name, report in other.reports.items() if "error" in report}
        return StepNews(reports, self.unfinished or other.unfinished)
