"""The embedded engine: blending and generation with torch and transformers, on a CPU or one CUDA device."""

from __future__ import annotations

import asyncio
import logging
import platform
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from typing_extensions import Self

from blend_rag.blend.passes import BlendResult, blend, compute_chunk_kv
from blend_rag.blend.plan import BlendPlan, Hit, HotKV
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors import make_selector
from blend_rag.engines.answer import Answer
from blend_rag.engines.base import (
    Engine,
    Generation,
    GenerationChunk,
    SamplingParams,
    SegmentReport,
    WarmReport,
    check_length,
    sampling_params,
)
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.engines.fingerprint import model_fingerprint
from blend_rag.engines.hot import HotPrefixes
from blend_rag.engines.keeper import ChunkKeeper, Filled
from blend_rag.engines.loading import DEFAULT_MODEL_NAME, load_model_and_tokenizer, require_transformers, resolve_model
from blend_rag.engines.report import Lookup, make_report, segment_reports, token_fates
from blend_rag.engines.sampling import make_sampler
from blend_rag.engines.self_test import SelfTestReport, run_self_test
from blend_rag.errors import BlendRagError, PolicyError
from blend_rag.kv import STORE_DTYPES, ChunkKey, ChunkKV
from blend_rag.layout import Passage, Passages, PromptBuilder, PromptLayout, Segment, SegmentKind
from blend_rag.stores import KVStore, MemoryStore, MissReason, open_store

logger = logging.getLogger(__name__)

Emit = Callable[[int, str], None]
"""Called with the row and the text to show."""


class TransformersEngine:
    """Answers prompts with blended KV on a transformers model. Use as a context manager, or call `close`.

    Args:
        model: a local folder or GGUF file, a hub id, or None for the packaged SmolLM2-135M-Instruct.
        policy: what is recomputed where a call does not say.
        device: torch device; by default CUDA where there is one.
        dtype: of weights and computation; by default float32 on a CPU and the model's own elsewhere.
        store: where chunk KV is kept: a store, or URLs as `open_store` takes them; by default memory of its own.
        store_dtype: of kept KV: "float16", "bfloat16" or "float32".
        namespace: KV of one namespace is never seen by another.
        max_model_len: bound on prompt and answer; by default the model's.
        hot_bytes: bound on exact beginnings of prompts kept on the device.
        keep_new: after an answer, compute chunks that were not in the store once more, by themselves, and keep them.
        self_test: prove at load that blending this model is right.
        show_progress: progress bars while loading.

    Raises:
        ModelError: the model cannot be loaded, is not supported, or fails its self-test.
        PolicyError: an argument makes no sense.
        StoreError: the store's URL makes no sense, or it cannot be opened.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        policy: RecomputePolicy | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        store: KVStore | str | Sequence[str] | None = None,
        store_dtype: str = "float16",
        namespace: str = "",
        max_model_len: int | None = None,
        hot_bytes: int = 128 << 20,
        keep_new: bool = True,
        self_test: bool = True,
        show_progress: bool = False,
    ) -> None:
        self.policy = policy or RecomputePolicy()
        _check_settings(self.policy, store_dtype)  # before a model is loaded
        require_transformers()
        path = resolve_model(model, show_progress=show_progress)
        loaded, self.tokenizer = load_model_and_tokenizer(path, device, dtype)
        self.model_name = str(model) if model is not None else DEFAULT_MODEL_NAME
        self._init_from(loaded, store, store_dtype, namespace, max_model_len, hot_bytes, keep_new, self_test)

    @classmethod
    def from_loaded(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        policy: RecomputePolicy | None = None,
        store: KVStore | str | Sequence[str] | None = None,
        store_dtype: str = "float16",
        namespace: str = "",
        max_model_len: int | None = None,
        hot_bytes: int = 128 << 20,
        keep_new: bool = True,
        self_test: bool = True,
    ) -> TransformersEngine:
        """An engine over a model and a tokenizer that are loaded already. Arguments as in the class."""
        engine = cls.__new__(cls)
        engine.policy = policy or RecomputePolicy()
        _check_settings(engine.policy, store_dtype)
        engine.tokenizer = tokenizer
        engine.model_name = getattr(model.config, "name_or_path", "") or model.config.model_type
        engine._init_from(model, store, store_dtype, namespace, max_model_len, hot_bytes, keep_new, self_test)
        return engine

    def _init_from(
        self,
        model: Any,
        store: KVStore | str | Sequence[str] | None,
        store_dtype: str,
        namespace: str,
        max_model_len: int | None,
        hot_bytes: int,
        keep_new: bool,
        self_test: bool,
    ) -> None:
        self.decoder = TransformersDecoder(model)
        self._model = model
        self._eos_ids = _end_of_turn_ids(model, self.tokenizer)
        # sampling is ours alone: nothing of the model's defaults
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=sorted(self._eos_ids) or None,
            pad_token_id=_first(self.tokenizer.pad_token_id, min(self._eos_ids, default=None), 0),
            bos_token_id=model.config.bos_token_id,
        )
        self._owns_store = store is None or isinstance(store, (str, list, tuple))
        self.store: KVStore = _open(store)
        self._keeper = ChunkKeeper(self.store, model_fingerprint(model), store_dtype, namespace, self.decoder.shape)
        self._keep_new = keep_new
        limit = int(model.config.max_position_embeddings)
        self.max_model_len = min(limit, max_model_len) if max_model_len else limit
        self._hot = HotPrefixes(hot_bytes)
        self._closed = False
        self.self_test_report: SelfTestReport | None = run_self_test(self.decoder) if self_test else None

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def device_description(self) -> str:
        """Device, machine and CPU threads, for reports."""
        return f"{self.device} ({platform.machine()}, {torch.get_num_threads()} threads)"

    def clear_hot(self) -> None:
        """Drop the exact KV kept on the device; stored chunk KV stays."""
        self._hot.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, the hot KV and, if it is the engine's own, the store."""
        if self._closed:
            return
        self._closed = True
        self._hot.clear()
        if self._owns_store:
            self.store.close()
        del self.decoder, self._model

    @property
    def fingerprint(self) -> str:
        return self._keeper.fingerprint

    @property
    def store_dtype(self) -> str:
        return self._keeper.dtype

    @property
    def namespace(self) -> str:
        return self._keeper.namespace

    def key(self, chunk_ids: Sequence[int], context_ids: Sequence[int] = ()) -> ChunkKey:
        """Key of a chunk's KV in this engine's store."""
        return self._keeper.key(chunk_ids, context_ids)

    # Warming

    def warm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport:
        """Compute KV of the passages behind the builder's prefix, and of the prefix itself, and keep it.

        Args:
            prompts: lays out the prompts these passages will be used in, so that what is warmed is what is prompted.
            passages: texts or passages; what is in the store already is skipped.
            context: "prefix" or "alone".
            show_progress: a bar over tokens.

        Raises:
            PromptTooLongError: a passage does not fit into the model's context.
            PolicyError: unknown context.
        """
        self._check_open()
        started = time.perf_counter()
        context_ids = prompts.prefix_ids if RecomputePolicy(context=context).context == "prefix" else ()
        chunks: dict[tuple[int, ...], set[str]] = {}
        for passage in Passages.of(passages).passages:
            for piece in prompts.chunk_pieces(passage.text):
                chunks.setdefault(piece, set()).update([passage.document] if passage.document else [])
        for chunk in chunks:
            check_length(len(context_ids) + len(chunk), self.max_model_len, "a passage and its prefix need")
        total = sum(map(len, chunks))
        with tqdm(total=total, desc="warming", unit="tok", disable=not show_progress) as bar:
            done = self._fill(chunks, context_ids, bar.update)
        return WarmReport(
            chunks=len(chunks),
            computed=done.computed,
            present=done.present,
            tokens_computed=done.tokens_computed,
            seconds=time.perf_counter() - started,
            refused=tuple(done.refused),
        )

    def forget_document(self, document: str) -> int:
        """Forget a document: delete the KV that no other document of the namespace uses; how many chunks.

        Raises:
            StoreError: some may still be there; try again.
        """
        self._check_open()
        self._hot.clear()
        return self.store.delete_document(document, self.namespace)

    def _fill(
        self,
        chunks: Mapping[tuple[int, ...], Iterable[str]],
        context_ids: tuple[int, ...],
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Filled:
        """Compute and keep what the store lacks of the chunks, and of the prefix they stand behind."""

        def compute(batch: Sequence[tuple[int, ...]]) -> list[ChunkKV]:
            context = self._context_kv(context_ids) if context_ids else None
            return compute_chunk_kv(self.decoder, batch, context, self._keeper.torch_dtype)

        def compute_alone(batch: Sequence[tuple[int, ...]]) -> list[ChunkKV]:
            return compute_chunk_kv(self.decoder, batch, None, self._keeper.torch_dtype)

        prefix = self._keeper.fill({context_ids: ()}, (), compute_alone) if context_ids else Filled()
        done = self._keeper.fill(chunks, context_ids, compute, progress)
        done.refused[:0] = prefix.refused
        return done

    def _context_kv(self, context_ids: tuple[int, ...]) -> HotKV:
        """Exact KV of a prefix, freshly computed unless it is hot: stored KV has been through a smaller dtype."""
        hot = self._hot.find(context_ids)
        if hot and hot.length == len(context_ids):
            return hot
        layout = PromptLayout(context_ids, (Segment(SegmentKind.PREFIX, 0, len(context_ids), ""),))
        kv = blend(self.decoder, [BlendPlan.of(layout, {}, RecomputePolicy())])[0].kv.leading(len(context_ids))
        self._hot.add(context_ids, kv)
        return kv

    # Looking up

    def lookup(self, layout: PromptLayout, *, policy: RecomputePolicy | None = None) -> tuple[SegmentReport, ...]:
        """What would be reused now, per segment; computes nothing. Candidates count as reused."""
        self._check_open()
        plan, found = self._plan(layout, policy or self.policy)
        return segment_reports(layout, token_fates(plan, plan.candidates[:0]), found)

    def find_kv(self, layout: PromptLayout, policy: RecomputePolicy) -> Lookup:
        """Stored KV for every segment that may be reused under `policy`; hot KV is not looked at."""
        hits: dict[int, Hit] = {}
        reasons: dict[int, MissReason] = {}
        for index, segment in enumerate(layout.segments):
            if segment.kind is SegmentKind.CHUNK and not policy.reuse:
                reasons[index] = MissReason.REUSE_OFF
            elif segment.kind in (SegmentKind.CHUNK, SegmentKind.PREFIX) and policy.reuse:
                hit, reason = self._find_segment(layout, segment, policy)
                if hit:
                    hits[index] = hit
                if reason and segment.kind is SegmentKind.CHUNK:
                    reasons[index] = reason
        return Lookup(hits, reasons)

    def _find_segment(
        self, layout: PromptLayout, segment: Segment, policy: RecomputePolicy
    ) -> tuple[Hit | None, MissReason | None]:
        """Prefix-keyed KV first, context-free KV second; the reason tells why the first choice was missing."""
        reason = None
        ids = layout.ids(segment)
        behind_prefix = policy.context == "prefix" and segment.kind is SegmentKind.CHUNK and layout.context_ids
        for context_ids in [layout.context_ids, ()] if behind_prefix else [()]:
            found = self._keeper.find(ids, context_ids, segment.document)
            if isinstance(found, ChunkKV):
                return Hit(found, tuple(context_ids)), reason
            reason = reason or found
        return None, reason

    def plan(self, layout: PromptLayout, policy: RecomputePolicy) -> BlendPlan:
        """How this prompt would be blended now; computes nothing."""
        return self._plan(layout, policy)[0]

    def _plan(self, layout: PromptLayout, policy: RecomputePolicy) -> tuple[BlendPlan, Lookup]:
        found = self.find_kv(layout, policy)
        hot = self._hot.find(layout.token_ids) if policy.reuse else None
        return BlendPlan.of(layout, found.hits, policy, hot), found

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
        """Answer one prompt, or several as one batch; prompts of a batch never see each other.

        Args:
            layouts: one layout or a sequence of them.
            sampling: how tokens are chosen; `options` are fields of it given by name, such as `max_tokens=64`.
            policy: what is recomputed; by default the engine's.

        Raises:
            PromptTooLongError: a prompt does not fit, says by how much.
            PolicyError: a sampling parameter or the selector makes no sense.
        """
        batch = [layouts] if isinstance(layouts, PromptLayout) else list(layouts)
        answers = self._answer(
            batch, sampling_params(sampling, options), policy, lambda row, text: None, threading.Event()
        )
        self._keep_new_chunks(batch, answers)
        return answers[0] if isinstance(layouts, PromptLayout) else answers

    def stream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Iterator[GenerationChunk]:
        """Answer one prompt piece by piece; the last piece holds the whole generation. Closing stops the work.

        Arguments and errors as in `generate`.
        """
        chosen = sampling_params(sampling, options)
        pieces: queue.SimpleQueue[GenerationChunk | BaseException] = queue.SimpleQueue()
        cancelled = threading.Event()
        work = threading.Thread(
            target=self._stream_into, args=(pieces.put, layout, chosen, policy, cancelled), daemon=True
        )
        work.start()
        try:
            while True:
                piece = pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.generation:
                    return
        finally:
            cancelled.set()
            work.join()

    def _stream_into(
        self,
        put: Callable[[GenerationChunk | BaseException], object],
        layout: PromptLayout,
        sampling: SamplingParams,
        policy: RecomputePolicy | None,
        cancelled: threading.Event,
    ) -> None:
        def emit(row: int, text: str) -> None:
            if text:
                put(GenerationChunk(text))

        try:
            [whole] = self._answer([layout], sampling, policy, emit, cancelled)
            put(GenerationChunk("", whole))
            self._keep_new_chunks([layout], [whole])
        except BaseException as error:  # handed to the caller's thread, where it is raised
            put(error)

    # Async twins: the same work in a thread

    async def awarm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport:
        """Async twin of `warm`."""
        return await asyncio.to_thread(self.warm, prompts, passages, context=context, show_progress=show_progress)

    async def aforget_document(self, document: str) -> int:
        """Async twin of `forget_document`."""
        return await asyncio.to_thread(self.forget_document, document)

    async def alookup(
        self, layout: PromptLayout, *, policy: RecomputePolicy | None = None
    ) -> tuple[SegmentReport, ...]:
        """Async twin of `lookup`."""
        return await asyncio.to_thread(self.lookup, layout, policy=policy)

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
        """Async twin of `generate`; cancelling the task stops the work."""
        batch = [layouts] if isinstance(layouts, PromptLayout) else list(layouts)
        cancelled = threading.Event()
        try:
            answers = await asyncio.to_thread(
                self._answer, batch, sampling_params(sampling, options), policy, lambda row, text: None, cancelled
            )
            await asyncio.to_thread(self._keep_new_chunks, batch, answers)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return answers[0] if isinstance(layouts, PromptLayout) else answers

    async def astream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Async twin of `stream`."""
        chosen = sampling_params(sampling, options)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[GenerationChunk | BaseException] = asyncio.Queue()
        cancelled = threading.Event()

        def put(piece: GenerationChunk | BaseException) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work = asyncio.ensure_future(asyncio.to_thread(self._stream_into, put, layout, chosen, policy, cancelled))
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.generation:
                    return
        finally:
            cancelled.set()
            await asyncio.shield(work)

    # The one path every call above takes

    @torch.no_grad()
    def _answer(
        self,
        layouts: Sequence[PromptLayout],
        sampling: SamplingParams,
        policy: RecomputePolicy | None,
        emit: Emit,
        cancelled: threading.Event,
    ) -> list[Generation]:
        self._check_open()
        if not layouts:
            return []
        started = time.perf_counter()
        policy = policy or self.policy
        make_selector(policy)
        for layout in layouts:
            check_length(len(layout) + 1, self.max_model_len, "the prompt and one token of answer need")
        planned = [self._plan(layout, policy) for layout in layouts]
        results = blend(self.decoder, [plan for plan, _ in planned])
        sampler = make_sampler(sampling, len(layouts))
        scores = self.decoder.logits(torch.stack([result.last_hidden for result in results]))
        first = sampler(torch.zeros(len(layouts), 0, dtype=torch.long), scores).argmax(-1).tolist()  # type: ignore
        ttft = time.perf_counter() - started
        answers = [
            Answer(
                self.tokenizer,
                self._eos_ids,
                sampling,
                min(sampling.max_tokens, self.max_model_len - len(layout)),
            )
            for layout in layouts
        ]
        for row, (answer, token_id) in enumerate(zip(answers, first, strict=True)):
            emit(row, answer.add(token_id))
        if policy.reuse:
            self._keep_hot(layouts, [plan for plan, _ in planned], results)
        self._decode(layouts, results, answers, first, sampler, emit, cancelled)
        reports = [
            make_report(layout, plan, result.recomputed, found, ttft, self.tokenizer)
            for layout, (plan, found), result in zip(layouts, planned, results, strict=True)
        ]
        return [
            Generation(answer.text, tuple(answer.token_ids), answer.finish_reason or "cancelled", report)
            for answer, report in zip(answers, reports, strict=True)
        ]

    def _keep_hot(
        self, layouts: Sequence[PromptLayout], plans: Sequence[BlendPlan], results: Sequence[BlendResult]
    ) -> None:
        """Keep the exact beginning of every prompt; what stands behind the first approximate token never is."""
        shape = self.decoder.shape
        token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * self.decoder.dtype.itemsize
        for layout, plan, result in zip(layouts, plans, results, strict=True):
            exact = plan.exact_length
            if exact > plan.hot_length and self._hot.fits(exact * token_bytes):
                self._hot.add(layout.token_ids, result.kv.leading(exact))

    @torch.no_grad()
    def _keep_new_chunks(self, layouts: Sequence[PromptLayout], answers: Sequence[Generation]) -> None:
        """Keep chunks that had to be computed, so that they hit the next time.

        They are computed once more by themselves: the KV inside a prompt has seen what stood before it there.
        """
        if not self._keep_new:
            return
        new: dict[tuple[int, ...], dict[tuple[int, ...], set[str]]] = {}  # context → chunk → documents
        for layout, answer in zip(layouts, answers, strict=True):
            policy = answer.report.policy
            if not policy.reuse or answer.finish_reason == "cancelled":
                continue
            chunks = new.setdefault(layout.context_ids if policy.context == "prefix" else (), {})
            for segment, report in zip(layout.segments, answer.report.segments, strict=True):
                if segment.kind is SegmentKind.CHUNK and report.context is None:
                    documents = chunks.setdefault(layout.ids(segment), set())
                    documents.update([segment.document] if segment.document else [])
        for context_ids, chunks in new.items():
            try:
                if chunks:
                    self._fill(chunks, context_ids)
            except Exception as error:  # the answer is there already
                logger.warning("new chunks were not kept (%s: %s)", type(error).__name__, error)

    def _decode(
        self,
        layouts: Sequence[PromptLayout],
        results: Sequence[BlendResult],
        answers: Sequence[Answer],
        first: Sequence[int],
        sampler: Any,
        emit: Emit,
        cancelled: threading.Event,
    ) -> None:
        """Generate behind the blended KV with transformers' own loop, cache and attention, as one left-padded batch."""
        if all(answer.finish_reason for answer in answers):
            return
        longest = max(map(len, layouts))
        rows = [
            torch.tensor([0] * (longest - len(layout)) + [*layout.token_ids, token_id])
            for layout, token_id in zip(layouts, first, strict=True)
        ]
        mask = torch.stack([torch.arange(longest + 1) >= longest - len(layout) for layout in layouts]).long()
        self._model.generate(
            torch.stack(rows).to(self.device),
            attention_mask=mask.to(self.device),
            cache=self._seed_cache(results, longest),
            max_new_tokens=max(answer.max_tokens for answer in answers) - 1,
            do_sample=False,
            logits_processor=sampler,
            stopping_criteria=StoppingCriteriaList([_Collect(answers, emit, cancelled)]),
            eos_token_id=None,  # the answers themselves know when they end
        )

    def _seed_cache(self, results: Sequence[BlendResult], longest: int) -> DynamicCache:
        """A stock cache of the whole prompts; layers move over one by one, so the KV never exists twice."""
        cache = DynamicCache(config=self._model.config)
        for layer in range(self.decoder.shape.layers):
            pairs = [result.kv.take_layer(layer) for result in results]
            if len(pairs) == 1:
                cache.update(*pairs[0], layer)
                continue
            padded = [
                torch.cat(
                    [torch.nn.functional.pad(pair[side], (0, 0, longest - pair[side].shape[2], 0)) for pair in pairs]
                )
                for side in (0, 1)
            ]
            cache.update(padded[0], padded[1], layer)
        return cache

    def _check_open(self) -> None:
        if self._closed:
            msg = "this engine is closed: load a new one"
            raise BlendRagError(msg)


class _Collect(StoppingCriteria):
    """Hands every new token to its answer, and ends a row when its answer has ended."""

    def __init__(self, answers: Sequence[Answer], emit: Emit, cancelled: threading.Event) -> None:
        self._answers = answers
        self._emit = emit
        self._cancelled = cancelled

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        for row, (answer, token_id) in enumerate(zip(self._answers, input_ids[:, -1].tolist(), strict=True)):
            self._emit(row, answer.add(token_id))
        done = [bool(answer.finish_reason) or self._cancelled.is_set() for answer in self._answers]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


_engine_type: type[Engine] = TransformersEngine  # keeps the class true to the protocol


def _check_settings(policy: RecomputePolicy, store_dtype: str) -> None:
    make_selector(policy)
    if store_dtype not in STORE_DTYPES:
        msg = f"store_dtype={store_dtype!r} is unknown: choose one of {', '.join(STORE_DTYPES)}"
        raise PolicyError(msg)


def _open(store: KVStore | str | Sequence[str] | None) -> KVStore:
    if store is None:
        return MemoryStore()
    return open_store(store) if isinstance(store, (str, list, tuple)) else store  # type: ignore[return-value]


def _end_of_turn_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
