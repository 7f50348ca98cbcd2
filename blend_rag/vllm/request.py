"""A request's segments: from its parameters, from separators in its prompt, or from fixed windows.

Nothing here trusts the client: whatever does not add up is refused in words, and the request runs as plain prefill.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.wire import COMMAND_PROMPT, POLICY_FIELDS, Command, request_parameters
from blend_rag.errors import ConnectorError
from blend_rag.kv import FORMAT_VERSION, hash_token_ids
from blend_rag.layout import PromptLayout, Segment, SegmentKind, WindowSegmenter
from blend_rag.vllm.settings import BlendSettings, policy_from

__all__ = ["MAX_NAME", "BlendRequest", "BorderFinder", "Order", "RequestParser", "namespace_salt", "request_parameters"]

PARAMETERS = ("segments", "context_ids", "warm", "namespace", "window", "id", *POLICY_FIELDS)
"""What `kv_transfer_params` may hold for this connector."""

COMMAND_PARAMETERS = ("command", "prompt", "link", "document")
"""What it may hold besides in a command."""

MAX_NAME = 128
"""Characters of a client's name for a request."""

_MAX_DOCUMENT = 1024
_BLIND_SELECTORS = ("first-k", "random", "k-deviation", "v-deviation")
"""Rules whose choice does not depend on what stands behind the last chunk."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command and its arguments.

    Attributes:
        command: which.
        asked: the prompt a lookup is about, and under which policy.
        link: note the documents of chunks that a lookup finds.
        document: what to forget.
        name: the client's name of the request whose report is wanted.
    """

    command: Command
    asked: BlendRequest | None = None
    link: bool = False
    document: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """What to blend for one request.

    Attributes:
        layout: the whole prompt.
        policy: what is recomputed.
        namespace: whose KV.
        warm: compute and keep the chunks' KV; the answer does not matter.
        name: the client's own, under which the report can be asked for later.
        order: a command, carried out in place of a blend; `layout` is then its own short prompt.
    """

    layout: PromptLayout
    policy: RecomputePolicy
    namespace: str
    warm: bool = False
    name: str | None = None
    order: Order | None = None

    @property
    def blend_tokens(self) -> int:
        """Tokens whose KV the blend supplies: all but the last, which vLLM computes to answer."""
        return len(self.layout) - 1

    @property
    def first_chunk(self) -> int:
        """Position of the first token whose KV may be approximate."""
        return min((chunk.start for chunk in self.layout.of_kind(SegmentKind.CHUNK)), default=0)

    @property
    def chunks_end(self) -> int:
        """Position behind the last such token."""
        return max((chunk.end for chunk in self.layout.of_kind(SegmentKind.CHUNK)), default=len(self.layout))

    def salt(self) -> bytes:
        """Digest of everything but the tokens before a block that shapes its blended KV."""
        layout, policy = self.layout, self.policy
        seen = len(layout) if policy.selector not in _BLIND_SELECTORS else self.chunks_end
        data = {
            "format": FORMAT_VERSION,
            "policy": asdict(policy),
            "namespace": self.namespace,
            "warm": self.warm,
            "context": hash_token_ids(layout.context_ids),
            "segments": [(segment.kind.value, segment.end) for segment in layout.segments if segment.start < seen],
            "ids": hash_token_ids(layout.token_ids[:seen]),
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).digest()


def namespace_salt(namespace: str) -> bytes:
    """What keeps one namespace's blocks in vLLM's prefix cache from another's."""
    return hashlib.sha256(b"blend-rag namespace " + namespace.encode()).digest()


class BorderFinder:
    """Finds a separator's text in token ids, whatever its ends were merged with.

    Args:
        separator: the text.
        decode: text of one token.
    """

    def __init__(self, separator: str, decode: Callable[[int], str]) -> None:
        self._separator = separator
        self._decode = functools.lru_cache(maxsize=None)(decode)

    def find(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Spans [start, end) of tokens that hold a part of a separator, one for each, never overlapping."""
        texts = [self._decode(token_id) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, texts)))
        spans: list[tuple[int, int]] = []
        for match in re.finditer(re.escape(self._separator), "".join(texts)):
            first = bisect.bisect_right(ends, match.start())
            last = bisect.bisect_left(ends, match.end())
            start = max(first, spans[-1][1]) if spans else first  # neighbours may share a merged token
            spans.append((start, max(start, last + 1)))
        return spans


class RequestParser:
    """Finds the segments of requests.

    Args:
        settings: the server's.
        borders: finds separators in prompts without segments; None looks for none.
        max_model_len: bound on positions.
        vocabulary: bound on token ids.
    """

    def __init__(
        self, settings: BlendSettings, borders: BorderFinder | None, max_model_len: int, vocabulary: int
    ) -> None:
        self._settings = settings
        self._borders = borders
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary

    def parse(self, token_ids: Sequence[int], params: Mapping[str, Any] | None) -> BlendRequest | None:
        """What to blend; None for a request that asks for nothing and holds no chunks.

        Raises:
            ConnectorError: the parameters make no sense.
        """
        given = dict(params or {})
        if "command" in given:
            return self._command(tuple(token_ids), given)
        return self._blend(tuple(token_ids), {name: given[name] for name in PARAMETERS if name in given})

    def _blend(self, token_ids: tuple[int, ...], mine: Mapping[str, Any]) -> BlendRequest | None:
        namespace = mine.get("namespace", self._settings.namespace)
        if namespace != self._settings.namespace:
            raise ConnectorError("the namespace is not this server's")
        warm = mine.get("warm", False)
        if not isinstance(warm, bool):
            raise ConnectorError(f"warm is {warm!r}: give true or false")
        policy = policy_from(mine, self._settings.policy)
        layout = self._layout(token_ids, mine)
        if layout is None or not layout.of_kind(SegmentKind.CHUNK):
            if warm:
                raise ConnectorError("there is no chunk to warm: name the prompt's segments")
            return None
        self._check_positions(layout)
        name = _name(mine["id"], "id") if "id" in mine else None
        return BlendRequest(layout, replace(policy, ratio=0.0) if warm else policy, namespace, warm, name)

    def _command(self, token_ids: tuple[int, ...], given: Mapping[str, Any]) -> BlendRequest:
        """A command; its own prompt is one segment that is computed as it is."""
        if unknown := sorted(set(given) - {*PARAMETERS, *COMMAND_PARAMETERS}):
            raise ConnectorError(f"a command has no parameter {unknown[0]!r}")
        try:
            command = Command(given["command"])
        except ValueError as error:
            raise ConnectorError(f"there is no such command: there are {', '.join(Command)}") from error
        if len(token_ids) != COMMAND_PROMPT:
            raise ConnectorError(f"a command has a prompt of {COMMAND_PROMPT} tokens")
        namespace = given.get("namespace", self._settings.namespace)
        if namespace != self._settings.namespace:
            raise ConnectorError("the namespace is not this server's")
        order = Order(command)
        if command is Command.LOOKUP:
            prompt = self._token_ids(given.get("prompt"), "prompt")
            asked = self._blend(prompt, {name: given[name] for name in PARAMETERS if name in given})
            order = Order(command, asked, link=given.get("link") is True)
        elif command is Command.FORGET:
            order = Order(command, document=_name(given.get("document"), "document", _MAX_DOCUMENT))
        elif command is Command.REPORT:
            order = Order(command, name=_name(given.get("id"), "id"))
        layout = PromptLayout(token_ids, (Segment(SegmentKind.QUESTION, 0, len(token_ids), ""),))
        return BlendRequest(layout, self._settings.policy, namespace, order=order)

    def _check_positions(self, layout: PromptLayout) -> None:
        """Refuse what would need positions beyond the model's: RoPE tables end there.

        Chunks are computed behind their context, and a question that stands before a chunk is repeated at the end.
        """
        chunks = layout.of_kind(SegmentKind.CHUNK)
        questions = layout.of_kind(SegmentKind.QUESTION)
        behind = len(layout.context_ids) + max(map(len, chunks))
        echo = sum(map(len, questions)) if questions and questions[0].start < chunks[-1].end else 0
        if max(behind, len(layout) + echo) > self._max_model_len:
            raise ConnectorError(f"blending needs more than the {self._max_model_len} positions of this model")

    def _layout(self, token_ids: tuple[int, ...], given: Mapping[str, Any]) -> PromptLayout | None:
        if "segments" in given:
            segments = self._segments(given["segments"], len(token_ids))
            return PromptLayout(token_ids, segments, self._context(token_ids, segments, given.get("context_ids")))
        if self._borders and (spans := self._borders.find(token_ids)):
            return self._separated(token_ids, spans)
        window = given.get("window", self._settings.window)
        if window is None:
            return None
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConnectorError(f"window is {window!r}: give a number of tokens")
        layout = PromptLayout.from_token_ids(token_ids, WindowSegmenter(window))
        self._check_count(len(layout.segments))
        return layout

    def _segments(self, given: Any, total: int) -> tuple[Segment, ...]:
        if not isinstance(given, (list, tuple)) or not given:
            raise ConnectorError("segments is no list: give [kind, length] or [kind, length, document] for each")
        self._check_count(len(given))
        found, at = [], 0
        for entry in given:
            kind, length, document = _entry(entry)
            found.append(Segment(kind, at, at + length, "", document, document))
            at += length
        if at != total:
            raise ConnectorError(f"segments add up to {at} tokens, the prompt has {total}")
        if found[-1].kind is SegmentKind.CHUNK and len(found[-1]) == total:
            raise ConnectorError("the prompt is one chunk: nothing is asked of it")
        return tuple(found)

    def _check_count(self, count: int) -> None:
        if count > self._settings.max_segments:
            raise ConnectorError(f"{count} segments are more than max_segments={self._settings.max_segments}")

    def _context(self, token_ids: tuple[int, ...], segments: Sequence[Segment], given: Any) -> tuple[int, ...]:
        """Ids the chunks' KV is computed behind: as given, or the leading prefix segment's."""
        if given is None:
            return token_ids[: segments[0].end] if segments[0].kind is SegmentKind.PREFIX else ()
        return self._token_ids(given, "context_ids")

    def _token_ids(self, given: Any, name: str) -> tuple[int, ...]:
        if not isinstance(given, (list, tuple)) or len(given) >= self._max_model_len:
            raise ConnectorError(f"{name} is no list of token ids that fits into the model's context")
        if not all(type(token_id) is int and 0 <= token_id < self._vocabulary for token_id in given):
            raise ConnectorError(f"{name} holds something that is no token id of this model")
        return tuple(given)

    def _separated(self, token_ids: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> PromptLayout | None:
        """Segments between separators.

        What stands before the first is the prefix, what stands behind the last the question. A doubled separator opens
        a passage and the next one closes it, with anything around; single ones just divide passages.
        """
        pieces: list[tuple[int, int]] = []
        at = 0
        for start, end in spans:
            pieces += [(at, start), (start, end)]
            at = end
        pieces.append((at, len(token_ids)))
        enclosed = any(start == end for start, end in pieces[2:-1:2])
        kinds = [SegmentKind.SEPARATOR] * len(pieces)
        kinds[::2] = [SegmentKind.CHUNK] * len(pieces[::2])
        if enclosed:
            inside = False
            for index in range(0, len(pieces), 2):
                start, end = pieces[index]
                kinds[index] = SegmentKind.CHUNK if inside else SegmentKind.GLUE
                inside = start == end and index > 0 and not inside
        kinds[0], kinds[-1] = SegmentKind.PREFIX, SegmentKind.QUESTION
        segments = tuple(
            Segment(kind, start, end, "") for kind, (start, end) in zip(kinds, pieces, strict=True) if end > start
        )
        self._check_count(len(segments))
        if segments[-1].kind is not SegmentKind.QUESTION:
            return None  # nothing is asked
        return PromptLayout(token_ids, segments, self._context(token_ids, segments, None))


def _name(given: Any, what: str, longest: int = MAX_NAME) -> str:
    if not (isinstance(given, str) and 0 < len(given) <= longest):
        raise ConnectorError(f"{what} is no text of at most {longest} characters")
    return given


def _entry(entry: Any) -> tuple[SegmentKind, int, str | None]:
    if not isinstance(entry, (list, tuple)) or not 2 <= len(entry) <= 3:
        raise ConnectorError("a segment is [kind, length] or [kind, length, document]")
    kind, length, *rest = entry
    try:
        found = SegmentKind(kind)
    except ValueError as error:
        kinds = ", ".join(kind.value for kind in SegmentKind)
        raise ConnectorError(f"there is no kind of segment {str(kind)[:40]!r}: choose one of {kinds}") from error
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConnectorError("the length of a segment is no whole number of tokens above 0")
    document = rest[0] if rest else None
    if document is not None and not (isinstance(document, str) and 0 < len(document) <= _MAX_DOCUMENT):
        raise ConnectorError(f"a document's id is a text of at most {_MAX_DOCUMENT} characters")
    return found, length, document
