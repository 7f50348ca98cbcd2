"""The worker's half: looks chunk KV up, blends tile by tile, writes pages, keeps new chunks.

Every engine step does a bounded amount of work, so that other requests keep their pace. All ranks get the same orders
and decide alike: what depends on a rank's own memory or clock is agreed on first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from blend_rag.blend.passes import BlendResult, blend_in_steps, compute_chunk_kv
from blend_rag.blend.plan import BlendPlan, Hit, HotKV
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.base import TokenFate
from blend_rag.engines.hot import HotPrefixes
from blend_rag.engines.report import token_fates
from blend_rag.engines.wire import Command, segment_counts
from blend_rag.errors import ConnectorError, StoreError
from blend_rag.kv import ChunkKV
from blend_rag.layout import PromptLayout, Segment, SegmentKind
from blend_rag.stores import KVStore, MissReason, open_store
from blend_rag.vllm.decoder import VLLMDecoder
from blend_rag.vllm.fingerprint import sample_weights, served_fingerprint
from blend_rag.vllm.messages import ANY_PAGE, Job, Report, StepNews, StepOrders, Verification
from blend_rag.vllm.metrics import BlendStats
from blend_rag.vllm.pages import Pages, kv_bytes_per_token
from blend_rag.vllm.request import BlendRequest, Order
from blend_rag.vllm.self_check import NOISE_FACTOR, SelfCheck, check_blending, kv_difference, precision
from blend_rag.vllm.settings import BlendSettings
from blend_rag.vllm.tiers import Found, Lookup, Query, WorkerTiers

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown

Work = Generator[int | None, None, None]
"""A job under way: yields how many tokens went through the model, or None where it has to wait for the next step."""

CACHED = "cached"
"""Tier of tokens that vLLM's own prefix cache holds."""

_CONTEXT_BYTES = 256 << 20  # exact KV of prefixes, so that warming does not compute them for every chunk
_WORTH_READING = 128  # tokens; fewer are computed again in less time than their pages are read
_VERIFIED_TOKENS = 256
_PATIENCE = 8  # steps after which chunks that no request waits for get their turn


class _VerifyingError(Exception):
    """A request is left to vLLM, to compare its KV with ours; `tokens` of it."""

    def __init__(self, tokens: int) -> None:
        super().__init__("the first request is computed by vLLM, to verify blending")
        self.tokens = tokens


@dataclass(slots=True)
class _Chunk:
    """A segment whose KV may be reused: its lookups, first choice first, and what came of them."""

    index: int
    queries: list[Query]
    lookups: list[Lookup]
    found: Found | None = None
    query: Query | None = None
    reason: MissReason | None = None


@dataclass(slots=True)
class _Running:
    """A job under way."""

    job: Job
    chunks: list[_Chunk]
    started: float
    waits_for_pages: bool
    work: Work | None = None
    report: Report = field(default_factory=dict)


class BlendWorker:
    """Blends on one rank.

    Args:
        settings: the server's.
        vllm_config: vLLM's.
        block_size: tokens of a page.
        model: the loaded model.

    Raises:
        ConnectorError: the model or its pages cannot be blended, or the GPU tier does not fit.
        SelfTestError: blending it would give wrong answers.
        StoreError: the store cannot be opened.
    """

    def __init__(self, settings: BlendSettings, vllm_config: Any, block_size: int, model: torch.nn.Module) -> None:
        self._settings = settings
        self._block_size = block_size
        self._max_rows = int(vllm_config.scheduler_config.max_num_batched_tokens)
        with torch.inference_mode():
            self.decoder = VLLMDecoder(vllm_config, model)
            self.decoder.capture_graphs()
            self.pages = Pages(self.decoder, block_size)
        self._check_memory()
        self.self_check: SelfCheck | None = None
        if settings.self_check:
            self.self_check = check_blending(self.decoder, vllm_config.model_config.get_vocab_size())
        self._model = model
        self._fingerprint = served_fingerprint(vllm_config, model, self.decoder)
        self._sample = sample_weights(model, self.decoder)
        self.tiers = self._open_tiers(vllm_config)
        self.stats = BlendStats()
        self._contexts = HotPrefixes(_CONTEXT_BYTES)
        self._running: list[_Running] = []
        self._later: list[Work] = []  # chunks to compute and keep when no request waits
        self._steps_without_later = 0
        self._finished: set[str] = set()
        self._failed_pages: set[int] = set()
        self._reports: dict[str, Report] = {}
        self._was_unfinished = False
        self._told: set[str] = set()
        self._verifying: tuple[str, HotKV] | None = None
        self._is_verified = not settings.verify_first
        self._broken: str | None = None  # why nothing is blended any more
        self.clocks: list[tuple[str, Any, Any]] = []

    def _open_tiers(self, vllm_config: Any) -> WorkerTiers:
        settings = self._settings
        dtype = settings.store_dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.decoder.dtype is torch.bfloat16 else "float16"
        store: KVStore | None = None
        if settings.store:
            store = open_store(settings.store, allow_unsigned=settings.allow_unsigned)
        return WorkerTiers(
            self.decoder,
            fingerprint=self._fingerprint,
            dtype=dtype,
            namespace=settings.namespace,
            total_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
            gpu_bytes=settings.gpu_bytes,
            host_bytes=settings.host_bytes,
            store=store,
            timeout_s=settings.load_timeout,
        )

    def _check_memory(self) -> None:
        """Refuse a GPU tier that does not fit beside what vLLM has taken.

        Raises:
            ConnectorError: with the utilisation that would leave room.
        """
        if self.decoder.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info()
        needed = self._settings.gpu_bytes + kv_bytes_per_token(self.decoder) * self._max_rows
        if needed > free:
            raise ConnectorError(
                f"gpu_bytes and one blend need {needed / 2**30:.1f} GiB beside vLLM's memory, {free / 2**30:.1f} GiB "
                f"are free: lower --gpu-memory-utilization by {(needed - free) / total:.2f}, or gpu_bytes"
            )

    # One engine step

    @torch.inference_mode()
    def step(self, orders: StepOrders) -> None:
        """Take orders, then work until about `max_num_batched_tokens` tokens went through the model."""
        self._drop(orders.gone)
        if orders.forget:
            self._forget()
        for verification in orders.verify:
            self._verify(verification)
        for job in orders.jobs:
            self._running.append(self._begin(job, orders.filling))
        self._begin_work()
        spent = 0
        for running in list(self._running):  # first come, first served
            if running.work is not None and spent < self._max_rows:
                spent += self._advance(running, self._max_rows - spent)
        self._steps_without_later = self._steps_without_later + 1 if spent else _PATIENCE
        if self._later and self._steps_without_later >= _PATIENCE:
            self._advance_later()
        for running in self._running:
            running.waits_for_pages = False  # what this step fills is filled when the next begins

    def _verify(self, verification: Verification) -> None:
        """Compare what vLLM has computed for a request with what the blend's forward gave; stop if it differs."""
        if self._verifying is None or self._verifying[0] != verification.request_id:
            return
        expected, self._verifying = self._verifying[1], None
        worst = kv_difference(self.pages.read(verification.block_ids, expected.length), expected)
        allowed = NOISE_FACTOR * (self.self_check.noise if self.self_check else precision(self.decoder))
        if all(self.decoder.all_agree([worst <= allowed])):
            self._is_verified = True
            self.stats.count_request("verified")
            logger.info("blending is verified on a request: KV differs by %.2g, %.2g is allowed", worst, allowed)
        else:
            self._broken = f"KV of a request differs from vLLM's by {worst:.2g}, {allowed:.2g} is allowed"
            logger.error("nothing is blended any more: %s", self._broken)

    def _drop(self, gone: set[str]) -> None:
        if self._verifying and self._verifying[0] in gone:
            self._verifying = None  # it ended too soon: the next one serves
        for running in [running for running in self._running if running.job.request_id in gone]:
            self._running.remove(running)
            self._finished.add(running.job.request_id)  # its pages may be freed now
            self.stats.count_request("cancelled")

    def _begin(self, job: Job, filling: set[int]) -> _Running:
        chunks = []
        for index, queries in [] if job.request.order else _queries(job.request):
            chunks.append(_Chunk(index, queries, [self.tiers.look(query) for query in queries]))
        cached = set(job.block_ids[: -(-job.cached_tokens // self._block_size)])
        waits = bool(cached) and (ANY_PAGE in filling or bool(cached & filling))
        return _Running(job, chunks, time.perf_counter(), waits)

    def _begin_work(self) -> None:
        """Let jobs whose lookups have ended on every rank begin."""
        waiting = [running for running in self._running if running.work is None and not running.waits_for_pages]
        ready = self.decoder.all_agree([_all_ready(running.chunks) for running in waiting])
        for running, is_ready in zip(waiting, ready, strict=True):
            if is_ready:
                lookups = [lookup for chunk in running.chunks for lookup in chunk.lookups]
                _settle(running.chunks, self.decoder.all_agree([lookup.found is not None for lookup in lookups]))
                running.work = self._work(running)

    def _advance(self, running: _Running, budget: int) -> int:
        """Work on a job until so many tokens went through the model, or it ends or waits; how many did."""
        job, spent = running.job, 0
        assert running.work is not None
        try:
            while spent < budget:
                rows = next(running.work)
                if rows is None:
                    return spent
                spent += rows
            return spent
        except StopIteration:
            outcome = "warmed" if job.request.warm else "commanded" if job.request.order else "blended"
            self.stats.count_request(outcome)
        except Exception as error:
            self._fail(running, error)
        self._running.remove(running)
        self._finished.add(job.request_id)
        self._reports[job.request_id] = running.report
        return spent

    def _fail(self, running: _Running, error: Exception) -> None:
        """Let vLLM compute this request by itself."""
        job = running.job
        running.report = {"error": f"{type(error).__name__}: {error}"}
        if isinstance(error, _VerifyingError):
            running.report = {"error": str(error), "verify": error.tokens}
        self._failed_pages.update(job.block_ids[job.cached_tokens // self._block_size :])
        if isinstance(error, _VerifyingError):
            return
        self.stats.count_request("failed")
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            logger.exception("a blend failed; its request runs as plain prefill, further %s are only counted", kind)

    def _advance_later(self) -> None:
        self._steps_without_later = 0
        try:
            next(self._later[0])
        except StopIteration:
            self._later.pop(0)
        except Exception as error:
            self._later.pop(0)
            logger.warning("new chunks were not kept (%s: %s)", type(error).__name__, error)

    # One job

    def _work(self, running: _Running) -> Work:
        job, request = running.job, running.job.request
        if request.order:
            yield from self._carry_out(running, request.order)
            return
        if self._broken:
            raise ConnectorError(self._broken)
        if not self._is_verified and self._verifying is None and not request.warm:
            ids = request.layout.token_ids[: min(request.blend_tokens, _VERIFIED_TOKENS)]
            self._verifying = (job.request_id, (yield from self._exact(ids)))
            raise _VerifyingError(len(ids))
        self.stats.time("load", [time.perf_counter() - running.started])
        self._count_lookups(running.chunks)
        if request.warm:
            yield from self._warm(running.chunks)
        began = self._now()
        hits = {
            chunk.index: Hit(chunk.found.kv, chunk.query.context_ids)
            for chunk in running.chunks
            if chunk.found and chunk.query
        }
        plan = BlendPlan.of(request.layout, hits, request.policy, self._read_cached(job))
        [result] = yield from blend_in_steps(self.decoder, [plan], self._max_rows)
        self._write(job, result)
        self.clocks.append(("blend", began, self._now()))
        running.report = _report(job, plan, result, running.chunks)
        for outcome, count in running.report["tokens"].items():
            self.stats.add("tokens", outcome, count)
        new = [chunk.queries[0] for chunk in running.chunks if chunk.found is None]
        if new:
            self._later.append(self._keep(new))
        used = [(chunk.query, chunk.found.kv) for chunk in running.chunks if chunk.found and chunk.query]
        if used and self.tiers.has_gpu:
            self._later.append(self._promote(used))

    def _carry_out(self, running: _Running, order: Order) -> Work:
        """A command; then its own short prompt is computed like any other, so that vLLM can end it."""
        if order.command is Command.LOOKUP:
            running.report = {"chunks": (yield from self._find(order))}
        elif order.command is Command.FORGET:
            running.report = {"forgotten": (yield from self._forget_document(order.document))}
        plan = BlendPlan.of(running.job.request.layout, {}, RecomputePolicy(ratio=0.0))
        [result] = yield from blend_in_steps(self.decoder, [plan], self._max_rows)
        self._write(running.job, result)

    def _find(self, order: Order) -> Generator[int | None, None, list[dict[str, Any]]]:
        """Which chunks have KV, in the terms of a report; nothing is loaded."""
        if order.asked is None:
            return []
        asked = _queries(order.asked)
        presence = [(index, queries, [self.tiers.where(query) for query in queries]) for index, queries in asked]
        deadline = time.monotonic() + self._settings.load_timeout
        futures = [future for _, _, found in presence for future in found]
        while not self.decoder.all_agree([all(f.done() for f in futures) or time.monotonic() > deadline])[0]:
            yield None
        details = []
        for index, queries, found in presence:
            if order.asked.layout.segments[index].kind is not SegmentKind.CHUNK:
                continue
            tiers = [future.result() if future.done() else MissReason.TOO_SLOW for future in found]
            held = [(q, t) for q, t in zip(queries, tiers, strict=True) if not isinstance(t, MissReason)]
            query, tier = held[0] if held else (None, None)
            reason = tiers[0] if isinstance(tiers[0], MissReason) else None
            details.append(_detail(index, query, tier, reason))
            if order.link and query:
                self.tiers.link(query)
        return details

    def _forget_document(self, document: str) -> Generator[int | None, None, int]:
        deletion = self.tiers.forget_document(document)
        while not self.decoder.all_agree([deletion.done()])[0]:
            yield None
        return deletion.result()

    def _read_cached(self, job: Job) -> HotKV | None:
        """K and V of the exact leading tokens that vLLM's cache holds."""
        length = min(job.cached_tokens, job.request.first_chunk)
        return self.pages.read(job.block_ids, length) if length >= _WORTH_READING else None

    def _write(self, job: Job, result: BlendResult) -> None:
        """Fill the request's own pages, layer by layer."""
        start, end = job.cached_tokens, job.request.blend_tokens
        slots = self.pages.slots(job.block_ids, start, end)
        for layer in range(self.decoder.shape.layers):
            keys, values = result.kv.take_layer(layer)  # each [1, kv_heads, tokens, head_dim]
            self.pages.write(
                layer, keys[0, :, start:end].transpose(0, 1), values[0, :, start:end].transpose(0, 1), slots
            )

    def _warm(self, chunks: Sequence[_Chunk]) -> Work:
        """Compute and keep what a warming request lacks, and wait until the store has it."""
        missing = [chunk for chunk in chunks if chunk.query is not chunk.queries[0]]
        kept: list[Future[str | None]] = []
        for chunk in chunks:
            if chunk not in missing:
                kept += self.tiers.link(chunk.queries[0])
        computed = yield from self._compute([chunk.queries[0] for chunk in missing], kept)
        for chunk in missing:
            chunk.query = chunk.queries[0]
            chunk.found = Found(computed[chunk.query], COMPUTED)
        while not self.decoder.all_agree([all(future.done() for future in kept)])[0]:
            yield None
        complaints = [complaint for future in kept if (complaint := future.result())]
        if complaints:
            raise StoreError(f"{len(complaints)} chunks were not kept: {complaints[0]}")

    def _keep(self, queries: Sequence[Query]) -> Work:
        """Compute and keep chunks that were new to an answered request, unless they are there by now."""
        absent = self.decoder.all_agree([not self.tiers.in_memory(query) for query in queries])
        yield from self._compute([query for query, is_absent in zip(queries, absent, strict=True) if is_absent], [])

    def _promote(self, used: Sequence[tuple[Query, ChunkKV]]) -> Work:
        """Copy chunks that a request found in slower tiers to the GPU tier, for the next one."""
        for query, kv in used:
            if self.tiers.promote(query, kv):
                yield 0

    def _compute(
        self, queries: Iterable[Query], kept: list[Future[str | None]]
    ) -> Generator[int | None, None, dict[Query, ChunkKV]]:
        """KV of chunks, kept in every tier; a batch at a time, those behind one context together."""
        by_context: dict[tuple[int, ...], list[Query]] = {}
        for query in dict.fromkeys(queries):
            by_context.setdefault(query.context_ids, []).append(query)
        found: dict[Query, ChunkKV] = {}
        for context_ids, wanted in by_context.items():
            context = (yield from self._context(context_ids)) if context_ids else None
            for batch in _batches(wanted, self._max_rows):
                began = self._now()
                chunks = compute_chunk_kv(
                    self.decoder,
                    [query.chunk_ids for query in batch],
                    context,
                    self.tiers.dtype,
                    device=self.decoder.device,
                    max_rows=self._max_rows,
                )
                for query, kv in zip(batch, chunks, strict=True):
                    found[query] = kv
                    kept += self.tiers.keep(query, kv)
                    self.stats.add("bytes", "kept", kv.nbytes)
                self.clocks.append(("store", began, self._now()))
                yield sum(len(query.chunk_ids) for query in batch)
        return found

    def _context(self, context_ids: tuple[int, ...]) -> Generator[int | None, None, HotKV]:
        """Exact KV of a prefix, freshly computed: stored KV has been through a smaller dtype."""
        hot = self._contexts.find(context_ids)
        if hot and hot.length == len(context_ids):
            return hot
        context = yield from self._exact(context_ids)
        self._contexts.add(context_ids, context)
        return context

    def _exact(self, token_ids: tuple[int, ...]) -> Generator[int | None, None, HotKV]:
        """Exact KV of the beginning of a prompt."""
        layout = PromptLayout(token_ids, (Segment(SegmentKind.PREFIX, 0, len(token_ids), ""),))
        plan = BlendPlan.of(layout, {}, RecomputePolicy(ratio=0.0))
        [result] = yield from blend_in_steps(self.decoder, [plan], self._max_rows)
        return result.kv.leading(len(token_ids))

    def _count_lookups(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            if chunk.found:
                self.stats.add("hits", chunk.found.tier)
                self.stats.add("bytes", f"loaded from {chunk.found.tier}", chunk.found.kv.nbytes)
            if chunk.reason:
                self.stats.add("misses", chunk.reason.value)

    # What vLLM asks for after a step

    def finished(self, finished_ids: set[str]) -> set[str]:
        """Requests whose pages are filled, have failed, or are wanted by nobody any more."""
        self._drop(finished_ids)
        done, self._finished = self._finished, set()
        return done

    def failed_pages(self) -> set[int]:
        """Pages that were not filled."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def news(self) -> StepNews | None:
        """What to tell the scheduler; None where nothing is new."""
        reports, self._reports = self._reports, {}
        unfinished = bool(self._later)
        if not reports and not unfinished and not self._was_unfinished:
            return None
        self._was_unfinished = unfinished
        return StepNews(reports, unfinished)

    def take_stats(self) -> BlendStats | None:
        """What was counted since; ranks count alike, so the first one speaks for all."""
        self._read_clocks()
        taken = self.stats.take()
        return taken if self.decoder.rank == 0 else None

    def _now(self) -> Any:
        """A moment on the device's clock, which need not have come yet."""
        if self.decoder.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read_clocks(self) -> None:
        waiting = []
        for phase, began, ended in self.clocks:
            if isinstance(began, float):
                self.stats.time(phase, [ended - began])
            elif ended.query():
                self.stats.time(phase, [began.elapsed_time(ended) / 1e3])
            else:
                waiting.append((phase, began, ended))
        self.clocks = waiting

    def _forget(self) -> None:
        """Forget KV in memory; where the weights have changed since, KV of the old ones is never met again."""
        self._contexts.clear()
        self._later.clear()
        self.tiers.clear()
        if (sample := sample_weights(self._model, self.decoder)) != self._sample:
            self._sample = sample
            self.tiers.use_fingerprint(hashlib.sha256(self._fingerprint.encode() + sample).hexdigest())
            logger.warning("the weights have changed: chunk KV of the former ones is not used any more")

    def close(self) -> None:
        """Stop threads and close the store."""
        self.tiers.close()


COMPUTED = "computed"
"""Tier of chunk KV that a warming request has just computed."""


def _queries(request: BlendRequest) -> list[tuple[int, list[Query]]]:
    """Segments whose KV may be found, by index: prefix-keyed KV first, context-free KV second."""
    layout, policy = request.layout, request.policy
    context_ids = layout.context_ids if policy.context == "prefix" else ()
    found = []
    for index, segment in enumerate(layout.segments):
        ids = layout.ids(segment)
        if segment.kind is SegmentKind.CHUNK:
            choices = [context_ids, ()] if context_ids else [()]
            found.append((index, [Query(ids, choice, segment.document) for choice in choices]))
        elif segment.kind is SegmentKind.PREFIX and segment.start == 0 and policy.ratio < 1:
            found.append((index, [Query(ids, ())]))
    return found


def _all_ready(chunks: Sequence[_Chunk]) -> bool:
    return all(lookup.ready() for chunk in chunks for lookup in chunk.lookups)


def _settle(chunks: Sequence[_Chunk], hits: Sequence[bool]) -> None:
    """Choose among the lookups of every chunk; `hits` says which of them every rank has found."""
    agreed = iter(hits)
    for chunk in chunks:
        for query, lookup in zip(chunk.queries, chunk.lookups, strict=True):
            if next(agreed) and chunk.found is None:
                chunk.found, chunk.query = lookup.found, query
        if chunk.query is not chunk.queries[0]:
            chunk.reason = chunk.lookups[0].reason or MissReason.FAILED


def _batches(queries: Sequence[Query], max_rows: int) -> Iterable[list[Query]]:
    batch: list[Query] = []
    for query in queries:
        if batch and sum(len(other.chunk_ids) for other in batch) + len(query.chunk_ids) > max_rows:
            yield batch
            batch = []
        batch.append(query)
    if batch:
        yield batch


def _report(job: Job, plan: BlendPlan, result: BlendResult, chunks: Sequence[_Chunk]) -> Report:
    """What the answer of a request is told."""
    fates = token_fates(plan, result.recomputed)
    tokens = {CACHED: fates.count(TokenFate.HOT)}
    details: list[dict[str, Any]] = []
    layout = job.request.layout
    for chunk in chunks:
        segment = layout.segments[chunk.index]
        if chunk.found:
            reused = fates[segment.start : segment.end].count(TokenFate.REUSED)
            tokens[chunk.found.tier] = tokens.get(chunk.found.tier, 0) + reused
        if segment.kind is SegmentKind.CHUNK:
            details.append(_detail(chunk.index, chunk.query, chunk.found.tier if chunk.found else None, chunk.reason))
    tokens["recomputed"] = fates.count(TokenFate.RECOMPUTED)
    tokens["computed"] = tokens.get("computed", 0) + fates.count(TokenFate.COMPUTED)
    misses: dict[str, int] = {}
    for detail in details:
        if detail["reason"]:
            misses[detail["reason"]] = misses.get(detail["reason"], 0) + 1
    return {
        "prompt_tokens": len(plan),
        "tokens": tokens,
        "exact": len(result.recomputed) == len(plan.candidates),
        "ratio": plan.policy.ratio,
        "selector": plan.policy.selector,
        "recomputed": result.recomputed.tolist() if len(result.recomputed) <= _LISTED else None,
        "segments": segment_counts(layout, fates),
        "chunks": details,
        "misses": misses,
    }


def _detail(index: int, query: Query | None, tier: str | None, reason: MissReason | None) -> dict[str, Any]:
    """What a report tells of a chunk."""
    context = None if query is None else "prefix" if query.context_ids else "alone"
    return {"segment": index, "tier": tier, "context": context, "reason": reason.value if reason else None}


_LISTED = 4096
"""Recomputed positions told one by one, at most."""
