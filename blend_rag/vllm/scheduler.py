"""The scheduler's half: which requests are blended, and under which hashes their pages are cached."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from blend_rag.engines.wire import REPORT, Command
from blend_rag.errors import BlendRagError, ConnectorError
from blend_rag.layout import Segment
from blend_rag.vllm.messages import ANY_PAGE, Job, Report, StepNews, StepOrders, Verification
from blend_rag.vllm.metrics import BlendStats
from blend_rag.vllm.request import MAX_NAME, BlendRequest, RequestParser, namespace_salt
from blend_rag.vllm.settings import BlendSettings

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown

_BYPASSES = {
    "prompt_logprobs": "asks for log-probabilities of the prompt",
    "lora": "uses a LoRA adapter",
    "embeds": "is given as embeddings",
    "multimodal": "holds images or other media",
    "cache off": "skips cached prefixes",
}


_KEPT_REPORTS = 4096
"""Reports that can still be asked for by their requests' names."""


@dataclass(slots=True)
class _Tracked:
    """A request that may be blended, or a command."""

    request: BlendRequest
    salt: bytes
    failed: bool = False
    live: Any = None  # vLLM's request, once it runs as plain prefill to verify blending
    block_ids: tuple[int, ...] = ()
    report: Report = field(default_factory=dict)


class BlendScheduler:
    """Keeps track of requests between arrival and end.

    Args:
        settings: the server's.
        parser: finds segments.
        block_size: tokens of a page.
        caches_prefixes: vLLM's prefix cache is on.
        about: what clients may know of this server.
    """

    def __init__(
        self,
        settings: BlendSettings,
        parser: RequestParser,
        block_size: int,
        caches_prefixes: bool,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._parser = parser
        self._block_size = block_size
        self._caches_prefixes = caches_prefixes
        self._tracked: dict[str, _Tracked] = {}
        self._under_way: dict[bytes, str] = {}  # salt of a blend to the request that waits for it
        self._jobs: list[Job] = []
        self._gone: set[str] = set()
        self._told: set[str] = set()
        self._about = dict(about or {})
        self._declined: dict[str, Report] = {}  # of requests that run as plain prefill, by vLLM's id
        self._named: OrderedDict[str, Report] = OrderedDict()  # reports by the client's names
        self._unfinished = False
        self._forget = False
        self.stats = BlendStats()

    def on_new_request(self, request: Any) -> None:
        """Parse a request, and salt the hashes of every page whose KV may be approximate."""
        params = request.kv_transfer_params
        if self._settings.namespace:
            _salt(request.block_hashes, 0, namespace_salt(self._settings.namespace))
        tracked = self._parse(request, params)
        if tracked is None:
            return
        blend = tracked.request
        self._tracked[request.request_id] = tracked
        _salt(request.block_hashes, blend.first_chunk // self._block_size, tracked.salt)

    def _parse(self, request: Any, params: Mapping[str, Any] | None) -> _Tracked | None:
        """What to blend; None, and never an exception, for whatever cannot be."""
        obstacle = _obstacle(request)
        try:
            if params is not None and not isinstance(params, Mapping):
                raise ConnectorError("kv_transfer_params is no object")
            if obstacle:
                if params:
                    self.stats.count_request("bypassed")
                    self._decline(request, f"a request {_BYPASSES[obstacle]}")
                return None
            blend = self._parser.parse(request.prompt_token_ids, params)
            if blend is None or not blend.blend_tokens:
                return None
            # warming and commands look every time: pages of an earlier one must not answer for them
            once = request.request_id.encode() if blend.warm or blend.order else b""
            tracked = _Tracked(blend, blend.salt() + once)
            if blend.order and blend.order.command is Command.ABOUT:
                tracked.report = dict(self._about)
            return tracked
        except BlendRagError as error:
            message = str(error)
        except Exception as error:  # a client must not be able to stop the engine
            message = f"{type(error).__name__}: {error}"
        self.stats.count_request("refused")
        self._decline(request, f"parameters of a request are refused ({message})")
        return None

    def _decline(self, request: Any, why: str) -> None:
        """Leave a request to vLLM; its answer and the log say why."""
        declined = self._declined[request.request_id] = {"error": why}
        params = request.kv_transfer_params
        if isinstance(params, Mapping) and isinstance(name := params.get("id"), str) and "command" not in params:
            self._keep_report(name, declined)
        self._say_once(f"{why}: it runs as plain prefill")

    def matched_tokens(self, request: Any, cached_tokens: int) -> tuple[int | None, bool]:
        """Tokens the blend will supply beyond those vLLM's cache holds; None to be asked again later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.failed or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        blend = tracked.request
        if blend.order and blend.order.command in (Command.ABOUT, Command.REPORT):
            return 0, False  # answered here
        if cached_tokens >= blend.chunks_end:  # an identical blend is cached; what is left is exact
            if not tracked.report:
                self.stats.count_request("cached")
                tracked.report = _cached_report(blend, cached_tokens)
                self._keep_report(tracked.request.name, tracked.report)
            return 0, False
        if self._caches_prefixes and self._under_way.get(tracked.salt, request.request_id) != request.request_id:
            return None, False  # the same blend is under way: wait and share its pages
        return blend.blend_tokens - cached_tokens, True

    def after_alloc(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """Pages are there: the worker can begin."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if external_tokens <= 0:
            if "verify" in tracked.report:
                tracked.live, tracked.block_ids = request, tuple(block_ids[0])
            return
        blend = tracked.request
        pages = -(-blend.blend_tokens // self._block_size)
        self._under_way[tracked.salt] = request.request_id
        self._jobs.append(
            Job(request.request_id, blend, tuple(block_ids[0][:pages]), blend.blend_tokens - external_tokens)
        )

    def orders(self, scheduler_output: Any) -> StepOrders:
        """What the workers are told for this step."""
        jobs, self._jobs = self._jobs, []
        forget, self._forget = self._forget, False
        return StepOrders(
            jobs,
            set(scheduler_output.finished_req_ids),
            _pages_filled(scheduler_output, self._block_size) if jobs else set(),
            self._verifications(),
            forget,
        )

    def _verifications(self) -> list[Verification]:
        """Requests whose first tokens vLLM has computed in earlier steps, for the workers to compare."""
        found = []
        for request_id, tracked in self._tracked.items():
            tokens = tracked.report.get("verify", 0) if tracked.live else 0
            if tokens and tracked.live.num_computed_tokens >= tokens:
                found.append(Verification(request_id, tracked.block_ids[: -(-tokens // self._block_size)]))
                tracked.live = None
                del tracked.report["verify"]
        return found

    def reset(self) -> None:
        """Have the workers forget what they hold in memory, before their next work."""
        self._forget = True

    def hear(self, news: StepNews) -> None:
        """Take what the workers report."""
        self._unfinished = news.unfinished
        for request_id, report in news.reports.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.report = report
            tracked.failed = "error" in report
            self._forget_under_way(request_id, tracked)
            self._keep_report(tracked.request.name, tracked.report)

    def finished(self, request: Any) -> Report | None:
        """Forget a request; what its answer is told."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            declined = self._declined.pop(request.request_id, None)
            return {REPORT: declined} if declined else None
        self._forget_under_way(request.request_id, tracked)
        self._jobs = [job for job in self._jobs if job.request_id != request.request_id]
        report = _told(tracked.report)
        order = tracked.request.order
        if order and order.command is Command.REPORT:
            report = {"report": self._named.get(order.name)}
        return {REPORT: report} if report else None

    def _keep_report(self, name: str | None, report: Report) -> None:
        """Let a report be asked for by the client's name of its request."""
        if name and len(name) <= MAX_NAME:
            self._named[name] = _told(report)
            if len(self._named) > _KEPT_REPORTS:
                self._named.popitem(last=False)

    @property
    def has_unfinished_work(self) -> bool:
        """Whether workers still compute or store chunk KV that no request waits for."""
        return self._unfinished

    def _forget_under_way(self, request_id: str, tracked: _Tracked) -> None:
        if self._under_way.get(tracked.salt) == request_id:
            del self._under_way[tracked.salt]

    def _say_once(self, message: str) -> None:
        if message not in self._told and len(self._told) < 1000:
            self._told.add(message)
            logger.warning("%s", message)


def _told(report: Report) -> Report:
    """A report without what only the scheduler needs."""
    return {name: value for name, value in report.items() if name != "verify"}


def _cached_report(blend: BlendRequest, cached_tokens: int) -> Report:
    """What the answer of a request is told whose identical blend vLLM's prefix cache holds."""
    total = len(blend.layout)
    return {
        "prompt_tokens": total,
        "tokens": {"cached": cached_tokens, "computed": total - cached_tokens},
        "exact": blend.policy.ratio == 1.0,
        "ratio": blend.policy.ratio,
        "selector": blend.policy.selector,
        "recomputed": [],
        "segments": [_cached_counts(segment, blend.first_chunk, cached_tokens) for segment in blend.layout.segments],
        "chunks": [],
        "misses": {},
    }


def _cached_counts(segment: Segment, first_chunk: int, cached_tokens: int) -> list[int]:
    """Tokens of a segment that are hot, reused, recomputed and computed where an identical blend is cached."""
    hot = max(0, min(segment.end, first_chunk, cached_tokens) - segment.start)
    cached = max(0, min(segment.end, cached_tokens) - segment.start)
    return [hot, cached - hot, 0, len(segment) - cached]


def _obstacle(request: Any) -> str | None:
    """Why a request must not be blended."""
    sampling = request.sampling_params
    if sampling is None or sampling.prompt_logprobs is not None:
        return "prompt_logprobs"
    checks = {
        "lora": request.lora_request is not None,
        "embeds": request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None,
        "multimodal": bool(request.mm_features),
        "cache off": bool(getattr(request, "skip_reading_prefix_cache", False)),
    }
    return next((name for name, holds in checks.items() if holds), None)


def _salt(block_hashes: list[Any], start: int, salt: bytes) -> None:
    """Give every block hash from `start` on another value; hashes added later chain on them."""
    for index in range(start, len(block_hashes)):
        digest = hashlib.sha256(salt + block_hashes[index]).digest()
        block_hashes[index] = type(block_hashes[index])(digest)


def _pages_filled(scheduler_output: Any, block_size: int) -> set[int]:
    """Pages that some request's own tokens are written to in this step."""
    filled: set[int] = set()
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        start = new.num_computed_tokens
        filled.update(new.block_ids[0][start // block_size : -(-(start + scheduled[new.req_id]) // block_size)])
    for index, request_id in enumerate(scheduler_output.scheduled_cached_reqs.req_ids):
        if scheduled.get(request_id, 0) > 1:  # its pages are not told again: take all its steps to be in the way
            filled.add(ANY_PAGE)
        new_blocks = scheduler_output.scheduled_cached_reqs.new_block_ids[index]
        filled.update(new_blocks[0] if new_blocks else ())
    return filled
