"""What a client and vLLM's connector say to each other: parameters of requests, commands, reports.

Plain data in `kv_transfer_params`, the one field that vLLM hands through to a connector and back. Knows layouts and
policies; knows neither vLLM nor HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.base import ReuseReport, SegmentReport, TokenFate
from blend_rag.layout import PromptLayout, Segment, SegmentKind

REPORT = "blend_rag"
"""Where in an answer's `kv_transfer_params` the report stands."""

POLICY_FIELDS = ("ratio", "selector", "check_layer", "schedule", "context", "seed")
"""What of a policy a request may name."""

COMMAND_PROMPT = 2
"""Tokens of a command's own prompt; what they are does not matter."""


class Command(str, Enum):
    """What a request asks of the connector instead of an answer.

    vLLM gives a connector no endpoint of its own, so a command travels as a completion of two tokens of prompt and one
    of answer; what it returns is the report.
    """

    ABOUT = "about"
    """Versions, the server's policy, whether it keeps KV in a lasting store."""
    LOOKUP = "lookup"
    """Which chunks of `prompt`, laid out by `segments`, have KV; with `link` their documents are noted too."""
    REPORT = "report"
    """The report of the request that was sent with this `id`: answers that are streamed carry none."""
    FORGET = "forget"
    """Delete the KV that only `document` uses."""


def request_parameters(
    layout: PromptLayout,
    *,
    policy: RecomputePolicy | None = None,
    warm: bool = False,
    namespace: str | None = None,
    request_id: str | None = None,
) -> dict[str, Any]:
    """What a client puts into `kv_transfer_params` to have a layout blended; the prompt is the layout's token ids.

    Args:
        layout: the prompt.
        policy: what to recompute; None leaves it to the server.
        warm: only compute and keep the chunks' KV.
        namespace: the server's; None takes it as it is.
        request_id: under which the report can be asked for later.
    """
    if policy is not None and not policy.reuse:
        return {"segments": [[SegmentKind.QUESTION.value, len(layout)]]}
    found: dict[str, Any] = {
        "segments": [
            [segment.kind.value, len(segment), *([segment.document] if segment.document else [])]
            for segment in layout.segments
        ]
    }
    first = layout.segments[0]
    leading = layout.ids(first) if first.kind is SegmentKind.PREFIX else ()
    if layout.context_ids != leading:
        found["context_ids"] = list(layout.context_ids)
    if policy:
        found |= policy_parameters(policy)
    if warm:
        found["warm"] = True
    if namespace is not None:
        found["namespace"] = namespace
    if request_id is not None:
        found["id"] = request_id
    return found


def policy_parameters(policy: RecomputePolicy) -> dict[str, Any]:
    """A policy as plain data."""
    return {name: getattr(policy, name) for name in POLICY_FIELDS}


def command_parameters(command: Command, **arguments: Any) -> dict[str, Any]:
    """What a client puts into `kv_transfer_params` of a command."""
    return {"command": command.value, **{name: value for name, value in arguments.items() if value is not None}}


def lookup_parameters(
    layout: PromptLayout, policy: RecomputePolicy, namespace: str | None = None, *, link: bool = False
) -> dict[str, Any]:
    """Parameters of `Command.LOOKUP`."""
    asked = request_parameters(layout, policy=policy, namespace=namespace)
    return command_parameters(Command.LOOKUP, prompt=list(layout.token_ids), link=link or None, **asked)


# Reports


def segment_counts(layout: PromptLayout, fates: Sequence[TokenFate]) -> list[list[int]]:
    """Tokens of every segment by fate: hot, reused, recomputed, computed."""
    order = list(TokenFate)
    return [[fates[segment.start : segment.end].count(fate) for fate in order] for segment in layout.segments]


def read_report(
    told: Mapping[str, Any] | None,
    layout: PromptLayout,
    policy: RecomputePolicy,
    ttft_s: float,
    texts: Sequence[str],
    missing: str = "",
) -> ReuseReport:
    """The connector's report in the engines' terms.

    Args:
        told: what the connector said; None where there is no word of it.
        layout: the prompt.
        policy: what was asked for.
        ttft_s: seconds to the first token.
        texts: text of every token of the prompt.
        missing: reason to give for chunks where nothing was told.
    """
    error = "" if told and "error" not in told else f"not blended: {told['error']}" if told else missing
    counts = _counts(told, layout)
    details = {detail["segment"]: detail for detail in (told or {}).get("chunks", ())}
    segments = []
    for index, (segment, count) in enumerate(zip(layout.segments, counts, strict=True)):
        detail = details.get(index, {})
        reason = detail.get("reason") or (error or None if segment.kind is SegmentKind.CHUNK else None)
        segments.append(_segment_report(segment, count, detail.get("context"), reason))
    hot, reused, recomputed, computed = (sum(column) for column in zip(*counts, strict=True))
    fates = _fates(layout, counts, (told or {}).get("recomputed") or ())
    return ReuseReport(
        prompt_tokens=len(layout),
        reused_tokens=hot + reused,
        hot_tokens=hot,
        recomputed_tokens=recomputed,
        computed_tokens=computed,
        ttft_s=ttft_s,
        exact=bool((told or {}).get("exact", not layout.of_kind(SegmentKind.CHUNK) or bool(error))),
        policy=policy,
        segments=tuple(segments),
        tokens=tuple(zip(texts, fates, strict=True)),
    )


def read_lookup(told: Mapping[str, Any], layout: PromptLayout) -> tuple[SegmentReport, ...]:
    """What `Command.LOOKUP` told, per segment: a chunk with KV counts as reused."""
    details = {detail["segment"]: detail for detail in told.get("chunks", ())}
    found = []
    for index, segment in enumerate(layout.segments):
        detail = details.get(index, {})
        here = detail.get("tier") is not None
        counts = [0, len(segment), 0, 0] if here else [0, 0, 0, len(segment)]
        found.append(_segment_report(segment, counts, detail.get("context"), detail.get("reason")))
    return tuple(found)


def _segment_report(segment: Segment, counts: Sequence[int], context: str | None, reason: str | None) -> SegmentReport:
    hot, reused, recomputed, computed = counts
    return SegmentReport(
        kind=segment.kind.value,
        source=segment.source,
        tokens=len(segment),
        hot=hot,
        reused=reused,
        recomputed=recomputed,
        computed=computed,
        context=context,
        reason=reason if hot < len(segment) else None,
    )


def _counts(told: Mapping[str, Any] | None, layout: PromptLayout) -> list[list[int]]:
    """Tokens of every segment by fate; all computed where nothing was told."""
    counts = (told or {}).get("segments")
    if counts and [sum(count) for count in counts] == [len(segment) for segment in layout.segments]:
        return [list(count) for count in counts]
    return [[0, 0, 0, len(segment)] for segment in layout.segments]


def _fates(layout: PromptLayout, counts: Sequence[Sequence[int]], recomputed: Sequence[int]) -> list[TokenFate]:
    """Fate of every token. Hot ones lead; in a reused segment only the prompt's last token can be a computed one.

    Where the recomputed positions were too many to be told, they are shown at the segment's beginning.
    """
    chosen = set(recomputed)
    fates: list[TokenFate] = []
    for segment, (hot, reused, again, _) in zip(layout.segments, counts, strict=True):
        here = {position for position in chosen if segment.start <= position < segment.end}
        if len(here) != again:
            here = set(range(segment.start + hot, segment.start + hot + again))
        left = reused
        for position in range(segment.start, segment.end):
            if position in here:
                fates.append(TokenFate.RECOMPUTED)
            elif position < segment.start + hot:
                fates.append(TokenFate.HOT)
            elif left:
                fates.append(TokenFate.REUSED)
                left -= 1
            else:
                fates.append(TokenFate.COMPUTED)
    return fates
