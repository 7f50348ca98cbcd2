"""Engines that hand every prompt to vLLM as a request of its own: in this process, or in a server.

vLLM batches requests by itself, so a batch here is many requests at once. Text is made from token ids as in the
embedded engine, so that answers are the same. Subclasses say how a request travels.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from tqdm.auto import tqdm
from typing_extensions import Self

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors import make_selector
from blend_rag.engines.answer import Answer
from blend_rag.engines.background import BackgroundLoop
from blend_rag.engines.base import (
    Generation,
    GenerationChunk,
    SamplingParams,
    SegmentReport,
    WarmReport,
    check_length,
    sampling_params,
)
from blend_rag.engines.wire import (
    COMMAND_PROMPT,
    REPORT,
    Command,
    command_parameters,
    lookup_parameters,
    read_lookup,
    read_report,
    request_parameters,
)
from blend_rag.errors import BlendRagError, PolicyError, ServerError
from blend_rag.layout import Passage, Passages, PromptBuilder, PromptLayout, Segment, SegmentKind

logger = logging.getLogger(__name__)

_WARM_TOKENS = 4096  # of chunks in one warming request, and in one lookup before it


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: token ids, how to sample, and what the connector is told."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    params: dict[str, Any]
    wants_report: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of an answer; the last piece has a finish reason, and the connector's word where it came along.

    `stop_reason` is the stop string or token that ended it, None at the end of the turn.
    """

    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    told: dict[str, Any] | None = field(default=None)


class RequestEngine(ABC):
    """What both engines over vLLM share. Use as a context manager, or call `close`.

    Raises:
        PolicyError: a policy cannot be asked of vLLM.
    """

    model_name: str
    tokenizer: Any
    max_model_len: int
    policy: RecomputePolicy
    namespace: str | None

    def __init__(self, name: str) -> None:
        self._loop = BackgroundLoop(name)
        self._closed = False
        self._texts: dict[int, str] = {}

    # What subclasses do

    @abstractmethod
    def _pieces(self, ask: Ask) -> AsyncIterator[Piece]:
        """Send a request; its answer piece by piece. Closing the iterator aborts it."""

    async def _again(self, work: Callable[[], Any], patience_s: float | None = None) -> Any:
        """Do work that may be repeated where the way to vLLM fails."""
        return await work()

    @abstractmethod
    async def _aclose(self) -> None:
        """Let go of what the subclass holds."""

    _concurrency: int = 64
    _report_early: bool = False
    """Ask for the report as soon as there is a first token, because the answer will not bring it along."""
    _warm_patience_s: float = 0.0

    # Opening and closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what still runs; chunk KV stays where vLLM keeps it."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._aclose())
            self._loop.close()

    def _check_open(self) -> None:
        if self._closed:
            msg = "this engine is closed: load a new one"
            raise BlendRagError(msg)

    # Commands

    async def _command(self, command: Command, **arguments: Any) -> dict[str, Any] | None:
        """What the connector answers to a command; None if nobody does."""
        if self.namespace is not None:
            arguments.setdefault("namespace", self.namespace)
        told = await self._send_command(command_parameters(command, **arguments))
        if told and "error" in told:
            msg = f"{command.value}: {told['error']}"
            raise ServerError(msg)
        return told

    async def _report(self, ask: Ask) -> dict[str, Any] | None:
        """The report on a request whose answer came without: it was streamed, or ended by a stop string.

        Behind a router another server may be asked, which knows nothing of it.
        """
        try:
            told = await self._send_command(command_parameters(Command.REPORT, id=ask.params["id"]))
        except ServerError as error:
            logger.info("no report: %s", error)
            return None
        return (told or {}).get("report")

    async def _send_command(self, params: dict[str, Any]) -> dict[str, Any] | None:
        one = SamplingParams(max_tokens=1)
        ids = (self.tokenizer.eos_token_id or 0,) * COMMAND_PROMPT
        pieces = [piece async for piece in self._pieces(Ask(ids, one, params))]
        return (pieces[-1].told or {}).get(REPORT) if pieces else None

    # Looking up, warming, forgetting

    def lookup(self, layout: PromptLayout, *, policy: RecomputePolicy | None = None) -> tuple[SegmentReport, ...]:
        """What would be reused now, per segment; computes nothing. Candidates count as reused.

        Raises:
            ServerError: the connector does not answer.
        """
        self._check_open()
        return self._loop.run(self._lookup(layout, self._checked(policy)))

    async def alookup(
        self, layout: PromptLayout, *, policy: RecomputePolicy | None = None
    ) -> tuple[SegmentReport, ...]:
        """Async twin of `lookup`."""
        self._check_open()
        return await self._loop.arun(self._lookup(layout, self._checked(policy)))

    async def _lookup(
        self, layout: PromptLayout, policy: RecomputePolicy, link: bool = False
    ) -> tuple[SegmentReport, ...]:
        if not policy.reuse or not layout.of_kind(SegmentKind.CHUNK):
            return read_lookup({}, layout)
        params = lookup_parameters(layout, policy, self.namespace, link=link)
        told = await self._again(lambda: self._send_command(params), self._warm_patience_s if link else None)
        if not told or "chunks" not in told:
            msg = f"lookup: {(told or {}).get('error', 'the connector does not answer')}"
            raise ServerError(msg)
        return read_lookup(told, layout)

    def warm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport:
        """Have the KV of the passages computed behind the builder's prefix and kept; skips what is there.

        Passages go out many to a request and several requests at once. Whatever a request has brought about stays, so
        a run that was broken off goes on where it stopped when it is repeated.

        Args:
            prompts: lays out the prompts these passages will be used in.
            passages: texts or passages.
            context: "prefix" or "alone".
            show_progress: a bar over tokens.

        Raises:
            PromptTooLongError: a passage does not fit into the model's context.
            PolicyError: unknown context.
            ServerError: the connector refuses.
        """
        self._check_open()
        return self._loop.run(self._warm(prompts, list(passages), context, show_progress))

    async def awarm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport:
        """Async twin of `warm`."""
        self._check_open()
        return await self._loop.arun(self._warm(prompts, list(passages), context, show_progress))

    async def _warm(
        self, prompts: PromptBuilder, passages: Sequence[Passage | str], context: str, show_progress: bool
    ) -> WarmReport:
        started = time.perf_counter()
        policy = replace(self.policy, context=context, reuse=True)
        context_ids = prompts.prefix_ids if context == "prefix" else ()
        layouts = await asyncio.to_thread(self._warming_layouts, prompts, passages, context_ids)
        total = sum(len(layout) - len(context_ids) - 1 for layout in layouts)
        done = _Warmed()
        turn = asyncio.Semaphore(self._concurrency)

        async def one(layout: PromptLayout) -> None:
            async with turn:
                await self._warm_one(layout, policy, done, bar)

        with tqdm(total=total, desc="warming", unit="tok", disable=not show_progress) as bar:
            tasks = [asyncio.ensure_future(one(layout)) for layout in layouts]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return WarmReport(
            chunks=done.computed + done.present + len(done.refused),
            computed=done.computed,
            present=done.present,
            tokens_computed=done.tokens_computed,
            seconds=time.perf_counter() - started,
            refused=tuple(done.refused),
        )

    def _warming_layouts(
        self, prompts: PromptBuilder, passages: Sequence[Passage | str], context_ids: tuple[int, ...]
    ) -> list[PromptLayout]:
        """Passages in as few prompts as their length allows, each chunk once for each of its documents."""
        chunks: dict[tuple[int, ...], set[str | None]] = {}
        for passage in Passages.of(passages).passages:
            for piece in prompts.chunk_pieces(passage.text):
                chunks.setdefault(piece, set()).add(passage.document)
        longest = self.max_model_len - len(context_ids) - 2  # a token to ask and one to answer
        for chunk in chunks:
            check_length(len(chunk), longest, "a passage needs")
        ask = context_ids[-1] if context_ids else (prompts.prefix_ids or (self.tokenizer.eos_token_id or 0,))[-1]
        bound = min(_WARM_TOKENS, longest)
        batches: list[list[tuple[tuple[int, ...], str | None]]] = []
        size = bound
        for chunk, documents in chunks.items():
            for document in sorted(documents - {None}, key=str) or [None]:
                if size + len(chunk) > bound:
                    batches.append([])
                    size = 0
                batches[-1].append((chunk, document))
                size += len(chunk)
        return [_warming_layout(context_ids, batch, ask) for batch in batches]

    async def _warm_one(self, layout: PromptLayout, policy: RecomputePolicy, done: _Warmed, bar: Any) -> None:
        """Warm one prompt's chunks: those that a lookup does not find are sent to be computed."""
        found = await self._lookup(layout, policy, link=True)
        absent = [
            (layout.ids(segment), segment.document)
            for segment, report in zip(layout.segments, found, strict=True)
            if segment.kind is SegmentKind.CHUNK and (report.reason is not None or report.computed)
        ]
        chunks = layout.of_kind(SegmentKind.CHUNK)
        done.present += len(chunks) - len(absent)
        tokens = sum(map(len, chunks))
        missing = sum(len(ids) for ids, _ in absent)
        bar.update(tokens - missing)
        if not absent:
            return
        sent = _warming_layout(layout.context_ids, absent, layout.token_ids[-1])
        params = request_parameters(sent, policy=policy, warm=True, namespace=self.namespace)
        ask = Ask(sent.token_ids, SamplingParams(max_tokens=1), params)
        told = await self._again(lambda: self._whole(ask), self._warm_patience_s)
        bar.update(missing)
        if not told or "error" in told:
            done.refused += [(told or {}).get("error", "the connector does not answer")] * len(absent)
            return
        computed = {detail["segment"] for detail in told["chunks"] if detail["tier"] == "computed"}
        fresh = [segment for index, segment in enumerate(sent.segments) if index in computed]
        done.computed += len(fresh)
        done.tokens_computed += sum(map(len, fresh))
        done.present += len(absent) - len(fresh)

    async def _whole(self, ask: Ask) -> dict[str, Any] | None:
        """Send a request whose answer does not matter; the connector's word on it."""
        pieces = [piece async for piece in self._pieces(ask)]
        return (pieces[-1].told or {}).get(REPORT) if pieces else None

    def forget_document(self, document: str) -> int:
        """Forget a document: delete the KV that no other document of the namespace uses; how many chunks.

        Raises:
            ServerError: some may still be there; try again.
        """
        self._check_open()
        return self._loop.run(self._forget(document))

    async def aforget_document(self, document: str) -> int:
        """Async twin of `forget_document`."""
        self._check_open()
        return await self._loop.arun(self._forget(document))

    async def _forget(self, document: str) -> int:
        told = await self._again(lambda: self._command(Command.FORGET, document=document))
        if not told:
            msg = f"the connector does not say whether {document} is forgotten: try again"
            raise ServerError(msg)
        return int(told["forgotten"])

    # Generating

    @overload
    def generate(
        self,
        layouts: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        layouts: Sequence[PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        layouts: PromptLayout | Sequence[PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Answer one prompt, or several at once.

        Args:
            layouts: one layout or a sequence of them.
            sampling: how tokens are chosen; `options` are fields of it given by name, such as `max_tokens=64`.
            policy: what is recomputed; by default the engine's.

        Raises:
            PromptTooLongError: a prompt does not fit, says by how much.
            PolicyError: a sampling parameter or the policy makes no sense.
            ServerError: vLLM refuses, or cannot be reached.
        """
        self._check_open()
        return self._loop.run(self._generate(layouts, sampling_params(sampling, options), self._checked(policy)))

    @overload
    async def agenerate(
        self,
        layouts: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Generation: ...

    @overload
    async def agenerate(
        self,
        layouts: Sequence[PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> list[Generation]: ...

    async def agenerate(
        self,
        layouts: PromptLayout | Sequence[PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Async twin of `generate`; cancelling the task aborts its requests."""
        self._check_open()
        chosen = sampling_params(sampling, options)
        return await self._loop.arun(self._generate(layouts, chosen, self._checked(policy)))

    def stream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Iterator[GenerationChunk]:
        """Answer one prompt piece by piece; the last piece holds the whole generation. Closing aborts the request.

        Arguments and errors as in `generate`; where the way to vLLM breaks after the first piece, nothing is repeated.
        """
        self._check_open()
        return self._loop.iterate(self._streaming(layout, sampling_params(sampling, options), self._checked(policy)))

    def astream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Async twin of `stream`."""
        self._check_open()
        return self._loop.aiterate(self._streaming(layout, sampling_params(sampling, options), self._checked(policy)))

    def _checked(self, policy: RecomputePolicy | None) -> RecomputePolicy:
        chosen = policy or self.policy
        make_selector(chosen)
        if chosen.selector == "oracle" or not chosen.correct_positions:
            msg = "the oracle and uncorrected positions are for research: use the embedded engine for them"
            raise PolicyError(msg)
        return chosen

    async def _generate(
        self, layouts: PromptLayout | Sequence[PromptLayout], sampling: SamplingParams, policy: RecomputePolicy
    ) -> Generation | list[Generation]:
        if isinstance(layouts, PromptLayout):
            return await self._answer(layouts, sampling, policy)
        turn = asyncio.Semaphore(self._concurrency)

        async def one(row: int, layout: PromptLayout) -> Generation:
            seeded = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + row)
            async with turn:
                return await self._answer(layout, seeded, policy)

        tasks = [asyncio.ensure_future(one(row, layout)) for row, layout in enumerate(layouts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _streaming(self, layout: PromptLayout, sampling: SamplingParams, policy: RecomputePolicy) -> Any:
        async def produce(put: Callable[[GenerationChunk], None]) -> None:
            whole = await self._answer(layout, sampling, policy, lambda text: put(GenerationChunk(text)))
            put(GenerationChunk("", whole))

        return produce

    async def _answer(
        self,
        layout: PromptLayout,
        sampling: SamplingParams,
        policy: RecomputePolicy,
        emit: Callable[[str], None] | None = None,
    ) -> Generation:
        """The one path every call takes."""
        check_length(len(layout) + 1, self.max_model_len, "the prompt and one token of answer need")
        started = time.perf_counter()
        blends = policy.reuse and bool(layout.of_kind(SegmentKind.CHUNK))
        params = request_parameters(
            layout, policy=policy, namespace=self.namespace, request_id=uuid.uuid4().hex if blends else None
        )
        allowed = min(sampling.max_tokens, self.max_model_len - len(layout))
        ask = Ask(layout.token_ids, replace(sampling, max_tokens=allowed), params, wants_report=blends)
        shown = False

        def show(text: str) -> None:
            nonlocal shown
            if text and emit:
                shown = True
                emit(text)

        async def once() -> tuple[Answer, float, dict[str, Any] | None]:
            return await self._collect(ask, sampling, show)

        async def once_at_most() -> tuple[Answer, float, dict[str, Any] | None]:
            try:
                return await once()
            except ConnectionError as error:
                if shown:
                    msg = f"the answer was broken off: {error}"
                    raise ServerError(msg) from error  # not to be repeated
                raise

        answer, first, told = await self._again(once_at_most)
        report = read_report(
            told,
            layout,
            policy,
            first - started,
            self._texts_of(layout.token_ids),
            missing="reuse is off" if not policy.reuse else "not reported",
        )
        return Generation(answer.text, tuple(answer.token_ids), answer.finish_reason or "cancelled", report)

    async def _collect(
        self, ask: Ask, sampling: SamplingParams, show: Callable[[str], None]
    ) -> tuple[Answer, float, dict[str, Any] | None]:
        """Answer, the moment of its first token, and the connector's word."""
        answer = Answer(self.tokenizer, (), sampling, ask.sampling.max_tokens)
        first = 0.0
        told: dict[str, Any] | None = None
        report: asyncio.Task[dict[str, Any] | None] | None = None
        try:
            async for piece in self._pieces(ask):
                ids = list(piece.token_ids)
                ends_turn = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
                if (ids or piece.finish_reason) and not first:
                    first = time.perf_counter()
                    if ask.wants_report and self._report_early and not piece.finish_reason:
                        report = asyncio.ensure_future(self._report(ask))
                if ends_turn and ids:
                    ids.pop()  # the token that ends the turn is no part of the answer
                for token_id in ids:
                    show(answer.add(token_id))
                if piece.finish_reason:
                    show(answer.end(piece.finish_reason if piece.finish_reason != "abort" else "cancelled"))
                    told = (piece.told or {}).get(REPORT)
            if told is None and ask.wants_report:
                told = await (report or self._report(ask))
        finally:
            if report:
                report.cancel()
        return answer, first, told

    def _texts_of(self, token_ids: Iterable[int]) -> list[str]:
        """Text of every token; each id is decoded once."""
        for token_id in token_ids:
            if token_id not in self._texts:
                self._texts[token_id] = str(self.tokenizer.decode([token_id]))
        return [self._texts[token_id] for token_id in token_ids]


@dataclass(slots=True)
class _Warmed:
    """What warming has done so far."""

    computed: int = 0
    present: int = 0
    tokens_computed: int = 0
    refused: list[str] = field(default_factory=list)


def _warming_layout(
    context_ids: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], str | None]], ask: int
) -> PromptLayout:
    """Chunks behind their context, and one token that asks."""
    ids = list(context_ids)
    segments = [Segment(SegmentKind.PREFIX, 0, len(ids), "")] if ids else []
    for chunk, document in chunks:
        segments.append(Segment(SegmentKind.CHUNK, len(ids), len(ids) + len(chunk), "", document, document))
        ids += chunk
    segments.append(Segment(SegmentKind.QUESTION, len(ids), len(ids) + 1, ""))
    return PromptLayout((*ids, ask), tuple(segments), context_ids)
