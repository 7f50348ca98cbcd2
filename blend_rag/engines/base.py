"""What every engine offers, and what it tells about an answer.

Knows layouts and policies; knows no model library.
"""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, overload, runtime_checkable

from typing_extensions import Self

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.errors import PolicyError, PromptTooLongError
from blend_rag.layout import Passage, PromptBuilder, PromptLayout, SegmentKind


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature=0` is greedy.

    Raises:
        PolicyError: a value makes no sense.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = [
            (self.max_tokens >= 1, "max_tokens must be at least 1"),
            (self.temperature >= 0, "temperature must be 0 (greedy) or more"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k >= 0, "top_k must be 0 (off) or more"),
            (not isinstance(self.stop, str), "stop is a tuple of strings: write stop=('text',)"),
            (all(self.stop), "a stop string cannot be empty"),
        ]
        for holds, message in checks:
            if not holds:
                raise PolicyError(message)


def sampling_params(sampling: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Parameters with some fields given by name.

    Raises:
        PolicyError: there is no such field, or a value makes no sense.
    """
    try:
        return replace(sampling or SamplingParams(), **options)
    except TypeError as error:
        msg = f"unknown sampling parameter ({error}): see SamplingParams for those there are"
        raise PolicyError(msg) from error


def check_length(tokens: int, allowed: int, who: str) -> None:
    """Refuse what does not fit into a model's context.

    Raises:
        PromptTooLongError: says by how much.
    """
    if tokens > allowed:
        msg = (
            f"{who} {tokens:,} tokens, {tokens - allowed:,} more than the model's {allowed:,}: "
            "use fewer or shorter passages"
        )
        raise PromptTooLongError(msg)


class TokenFate(str, Enum):
    """What happened to a token of a prompt."""

    HOT = "hot"
    """Exact KV already in the engine."""
    REUSED = "reused"
    """KV taken from the store as it is."""
    RECOMPUTED = "recomputed"
    """In the store, but selected to be computed again."""
    COMPUTED = "computed"
    """Never in question: question, history, glue, new chunks."""


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What happened to one segment: counts of tokens by fate, and for a chunk the reason where KV was missing.

    `context` tells behind what a reused chunk's KV was computed: "prefix" or "alone".
    """

    kind: str
    source: str | None
    tokens: int
    hot: int = 0
    reused: int = 0
    recomputed: int = 0
    computed: int = 0
    context: str | None = None
    reason: str | None = None


def chunks_with_kv(layout: PromptLayout, found: Sequence[SegmentReport]) -> list[bool]:
    """Which chunks of a layout would be reused, from what `lookup` says of it."""
    pairs = zip(found, layout.segments, strict=True)
    return [report.computed == 0 for report, segment in pairs if segment.kind is SegmentKind.CHUNK]


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How a prompt was answered. `reused + recomputed + computed == prompt_tokens`; hot tokens count as reused.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: tokens whose KV was taken as it is, from the store or from the engine.
        hot_tokens: the part of them that was exact and already in the engine.
        recomputed_tokens: reused-chunk tokens computed again.
        computed_tokens: all other tokens.
        ttft_s: seconds from the call to the first token.
        exact: True if nothing in this answer is approximated.
        segments: the same per segment.
        tokens: text and fate of every prompt token, for the coloured view.
    """

    prompt_tokens: int
    reused_tokens: int
    hot_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    ttft_s: float
    exact: bool
    policy: RecomputePolicy
    segments: tuple[SegmentReport, ...] = ()
    tokens: tuple[tuple[str, TokenFate], ...] = field(default=(), repr=False)

    @property
    def misses(self) -> dict[str, int]:
        """Chunks not reused (or reused only from the second choice), counted by reason."""
        found: dict[str, int] = {}
        for segment in self.segments:
            if segment.reason:
                found[segment.reason] = found.get(segment.reason, 0) + 1
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data without the prompt's text."""
        data = asdict(self)
        del data["tokens"]
        data["misses"] = self.misses
        return data

    def as_json(self) -> str:
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        parts = [
            f"{self.prompt_tokens} prompt tokens: {self.reused_tokens} reused ({self.hot_tokens} hot)",
            f"{self.recomputed_tokens} recomputed",
            f"{self.computed_tokens} computed",
            f"first token after {self.ttft_s * 1000:.0f} ms",
        ]
        parts += [f"{count} chunk{'s' * (count > 1)}: {reason}" for reason, count in self.misses.items()]
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        """The prompt with its tokens coloured by what happened to them, for notebooks."""
        legend = " ".join(
            f'<span style="background:{colour};padding:0 .4em">{fate.value}</span>' for fate, colour in _COLOURS.items()
        )
        spans: list[str] = []
        run: list[str] = []
        for i, (text, fate) in enumerate(self.tokens):
            run.append(html.escape(text))
            if i + 1 == len(self.tokens) or self.tokens[i + 1][1] is not fate:
                spans.append(f'<span style="background:{_COLOURS[fate]}">{"".join(run)}</span>')
                run = []
        return (
            f"<div><p>{html.escape(str(self))}</p><p>{legend}</p>"
            f'<div style="white-space:pre-wrap;font-family:monospace;color:#222">{"".join(spans)}</div></div>'
        )


_COLOURS = {
    TokenFate.HOT: "#f6d9a8",
    TokenFate.REUSED: "#c9e7cb",
    TokenFate.RECOMPUTED: "#f7b9b0",
    TokenFate.COMPUTED: "#c7d9f2",
}


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `finish_reason` is "stop" (end of turn or a stop string) or "length"."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of a streamed answer; the texts of all pieces join to the answer. The last one holds the whole."""

    text: str
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What warming did: chunks asked for, computed now, already there, and why any could not be kept."""

    chunks: int
    computed: int
    present: int
    tokens_computed: int
    seconds: float
    refused: tuple[str, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """Generates from layouts and warms chunks. Blocking calls may run in several threads at once."""

    model_name: str
    tokenizer: Any
    max_model_len: int
    policy: RecomputePolicy

    def warm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport:
        """Compute KV of passages, alone or behind the builder's prefix, and keep it; skips what is there."""
        ...

    def forget_document(self, document: str) -> int:
        """Delete the KV that no other document of the namespace uses; how many chunks."""
        ...

    def lookup(self, layout: PromptLayout, *, policy: RecomputePolicy | None = None) -> tuple[SegmentReport, ...]:
        """What would be reused now, per segment; computes nothing."""
        ...

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
        """Answer one prompt, or several as one batch; `options` are fields of `SamplingParams` given by name."""
        ...

    def stream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> Iterator[GenerationChunk]:
        """Answer one prompt piece by piece. Closing the iterator stops generation."""
        ...

    async def awarm(
        self,
        prompts: PromptBuilder,
        passages: Iterable[Passage | str],
        *,
        context: str = "prefix",
        show_progress: bool = False,
    ) -> WarmReport: ...

    async def aforget_document(self, document: str) -> int: ...

    async def alookup(
        self, layout: PromptLayout, *, policy: RecomputePolicy | None = None
    ) -> tuple[SegmentReport, ...]: ...

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
    ) -> Generation | list[Generation]: ...

    def astream(
        self,
        layout: PromptLayout,
        sampling: SamplingParams | None = None,
        *,
        policy: RecomputePolicy | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationChunk]: ...

    def close(self) -> None:
        """Free what the engine holds; a lasting store keeps what it has."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
