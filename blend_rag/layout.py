"""Prompts as token-exact segments.

Knows a tokenizer, never a model. Every segment is tokenised by itself and spliced as ids, so a chunk has the same ids
alone, at ingestion and in any prompt; documents, questions and history are literal text and cannot add control tokens.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from string import Formatter
from typing import Any, NamedTuple, Protocol

from blend_rag.errors import PromptError
from blend_rag.separators import Separator
from blend_rag.tokenization import PromptTokenizer

DEFAULT_SEPARATOR = "\n\n"
DEFAULT_TEMPLATE = "{context}\n\n{question}"
_FROZEN_DATE = datetime.date(2024, 7, 26)
_SENTINEL = re.compile(r"@@BLEND-RAG-PART-(\d+)@@")


class SegmentKind(StrEnum):
    """What a segment of a prompt is."""

    PREFIX = "prefix"
    """The stable leading part: BOS, system text, fixed instruction."""
    CHUNK = "chunk"
    """A retrieved passage, or one piece of it; the only kind whose KV is reused at other positions."""
    SEPARATOR = "separator"
    QUESTION = "question"
    HISTORY = "history"
    GLUE = "glue"
    """Template text outside the prefix."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a layout, the text they came from and, for a chunk, the document they belong to."""

    kind: SegmentKind
    start: int
    end: int
    text: str
    source: str | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt as flat token ids and the segments that tile them.

    `context_ids` is the stable prefix behind which chunk KV of this prompt was (or would be) computed; it is part of
    the key of such KV and need not be what physically leads this prompt.
    """

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    context_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            msg = "a prompt needs at least one token"
            raise PromptError(msg)
        borders = [0, *(segment.end for segment in self.segments)]
        starts = [segment.start for segment in self.segments]
        if borders[-1] != len(self.token_ids) or borders[:-1] != starts or any(a >= b for a, b in pairwise(borders)):
            msg = "segments do not tile the prompt: each must start where the one before ends, and none may be empty"
            raise PromptError(msg)

    def __len__(self) -> int:
        return len(self.token_ids)

    def ids(self, segment: Segment) -> tuple[int, ...]:
        """Token ids of one segment."""
        return self.token_ids[segment.start : segment.end]

    def of_kind(self, kind: SegmentKind) -> list[Segment]:
        """Segments of one kind, in order."""
        return [segment for segment in self.segments if segment.kind is kind]

    @classmethod
    def from_token_ids(
        cls, token_ids: Sequence[int], segmenter: Segmenter, context_ids: Sequence[int] = ()
    ) -> PromptLayout:
        """Segment flat ids of unknown origin: everything but the last piece is reusable, the last is the question.

        Raises:
            PromptError: there are no ids.
        """
        pieces = [piece for piece in segmenter.pieces(token_ids) if piece.end > piece.start]
        last = max((i for i, piece in enumerate(pieces) if not piece.separator), default=-1)
        kinds = [
            SegmentKind.SEPARATOR if piece.separator else SegmentKind.QUESTION if i == last else SegmentKind.CHUNK
            for i, piece in enumerate(pieces)
        ]
        segments = (Segment(kind, piece.start, piece.end, "") for kind, piece in zip(kinds, pieces, strict=True))
        return cls(tuple(token_ids), tuple(segments), tuple(context_ids))


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) between two cache borders."""

    start: int
    end: int
    separator: bool = False


class Segmenter(Protocol):
    """Where cache borders lie inside a run of ids; never changes an id."""

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """Pieces that tile `token_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentSegmenter:
    """One chunk per document."""

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        return [Piece(0, len(token_ids))]


@dataclass(frozen=True, slots=True)
class SeparatorSegmenter:
    """Borders at every separator."""

    separator: Separator

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        found: list[Piece] = []
        at = 0
        for start, end in self.separator.find(token_ids):
            found += [Piece(at, start), Piece(start, end, separator=True)]
            at = end
        found.append(Piece(at, len(token_ids)))
        return [piece for piece in found if piece.end > piece.start]


@dataclass(frozen=True, slots=True)
class WindowSegmenter:
    """Borders every `size` tokens: nothing about the documents has to be known."""

    size: int = 256

    def __post_init__(self) -> None:
        if self.size < 1:
            msg = f"a window needs at least 1 token, got size={self.size}"
            raise PromptError(msg)

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        count = len(token_ids)
        return [Piece(start, min(start + self.size, count)) for start in range(0, count, self.size)]


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text and the id of the document it comes from."""

    text: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Passages:
    """A group of retrieved passages standing together in a message, for example one tool result."""

    passages: tuple[Passage, ...]

    @classmethod
    def of(cls, passages: Iterable[Passage | str]) -> Passages:
        return cls(tuple(Passage(passage) if isinstance(passage, str) else passage for passage in passages))


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: its role and its content, text and groups of passages in any order.

    `extra` holds further fields the chat template may want, such as `tool_calls` or `name`.
    """

    role: str
    content: tuple[str | Passages, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, role: str, *content: str | Passages, **extra: Any) -> Message:
        return cls(role, content, extra)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a prompt before tokenisation; `passages` takes the place of `text` for a group of chunks."""

    kind: SegmentKind
    text: str = ""
    passages: Passages | None = None
    trusted: bool = False  # template text, in which control tokens count


class _Tokens(NamedTuple):
    """A tokenised part."""

    kind: SegmentKind
    text: str
    ids: tuple[int, ...]
    source: str | None = None


_Turn = tuple[str, list[_Part], Mapping[str, Any]]
"""A message on its way to the chat template: role, parts, further fields."""


class PromptBuilder:
    """Lays out prompts for one tokenizer and one stable prefix.

    Args:
        tokenizer: the model's fast tokenizer.
        system: system text; part of the stable prefix. None leaves what the chat template puts there by itself.
        template: text with `{context}` and `{question}` once each, in either order. In chat mode it is the user
            message, otherwise the whole prompt. Text before the first of them is a fixed instruction.
        separator: what stands between chunks: any string, the name of one reserved token, or None.
        segmenter: where cache borders lie inside a document; by default a document is one chunk.
        chat: use the tokenizer's chat template; by default if it has one.
        template_kwargs: further arguments of the chat template, such as `enable_thinking`.
        date: the date shown by templates that print one. It is frozen so that the prefix stays the same every day;
            put today's date into the question where it matters.

    Raises:
        PromptError: the template or the separator cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        template: str = DEFAULT_TEMPLATE,
        separator: str | None = DEFAULT_SEPARATOR,
        segmenter: Segmenter | None = None,
        chat: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        date: datetime.date = _FROZEN_DATE,
    ) -> None:
        self.tokenizer = tokenizer if isinstance(tokenizer, PromptTokenizer) else PromptTokenizer(tokenizer)
        has_template = self.tokenizer.chat_template is not None
        if chat and not has_template:
            msg = "this tokenizer has no chat template: pass chat=False, or set tokenizer.chat_template"
            raise PromptError(msg)
        self.chat = has_template if chat is None else chat
        self.system = system
        self.template = _parse_template(template)
        self.separator = None if separator is None else Separator.derive(self.tokenizer, separator)
        self.segmenter: Segmenter = segmenter or DocumentSegmenter()
        self._template_kwargs = dict(template_kwargs or {})
        self._date = date
        self.prefix_ids = self._stable_prefix()
        """Ids of the stable prefix: the context behind which `warm` computes chunks."""

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """The ids a passage has alone, at ingestion and in every prompt.

        Raises:
            PromptError: the passage has no tokens.
        """
        ids = self.tokenizer.literal(text)
        if not ids:
            msg = "a passage is empty: drop passages without text before building a prompt or warming"
            raise PromptError(msg)
        return ids

    def chunk_pieces(self, text: str) -> list[tuple[int, ...]]:
        """Ids of each separately cached piece of a passage, separators inside it left out."""
        ids = self.chunk_ids(text)
        return [ids[piece.start : piece.end] for piece in self.segmenter.pieces(ids) if not piece.separator]

    def build(
        self,
        *,
        question: str,
        passages: Iterable[Passage | str] = (),
        history: Sequence[Message] = (),
    ) -> PromptLayout:
        """Lay out one question over retrieved passages, after the messages of `history` where there are any.

        Raises:
            PromptError: the question or a passage is empty, or the chat template cannot show these messages.
        """
        if not question.strip():
            msg = "the question is empty: pass a question with at least one word"
            raise PromptError(msg)
        fields = {
            "context": _Part(SegmentKind.CHUNK, passages=Passages.of(passages)),
            "question": _Part(SegmentKind.QUESTION, question),
        }
        asked = [
            fields[name] if name else _Part(SegmentKind.GLUE, literal, trusted=True) for literal, name in self.template
        ]
        return self._lay_out([*self._messages_as_parts(history, asked_in_history=False), ("user", asked, {})])

    def build_messages(self, messages: Sequence[Message]) -> PromptLayout:
        """Lay out a whole conversation; the last user message that holds text is the question.

        Raises:
            PromptError: there is no message, no question, or the chat template cannot show these messages.
        """
        if not any(message.role == "user" and _has_text(message) for message in messages):
            msg = "the conversation holds no question: add a user message with text"
            raise PromptError(msg)
        return self._lay_out(self._messages_as_parts(messages, asked_in_history=True))

    def _messages_as_parts(
        self, messages: Sequence[Message], *, asked_in_history: bool
    ) -> list[_Turn]:
        asks = [i for i, message in enumerate(messages) if message.role == "user" and _has_text(message)]
        question_at = asks[-1] if asked_in_history and asks else -1
        found = []
        for i, message in enumerate(messages):
            kind = SegmentKind.QUESTION if i == question_at else SegmentKind.HISTORY
            parts = [
                _Part(SegmentKind.CHUNK, passages=content) if isinstance(content, Passages) else _Part(kind, content)
                for content in message.content
            ]
            found.append((message.role, parts, message.extra))
        return found

    def _lay_out(self, messages: list[_Turn]) -> PromptLayout:
        pieces = self._tokenise(self._render(messages))
        return _splice(pieces, self.prefix_ids)

    def _render(
        self, messages: list[_Turn], *, generation_prompt: bool = True
    ) -> list[_Part]:
        """Parts of the whole prompt in order, template text included."""
        system = [] if self.system is None else [_Part(SegmentKind.PREFIX, self.system)]
        if self.chat:
            leading: list[_Turn] = [("system", system, {})] if system else []
            return self._render_chat([*leading, *messages], generation_prompt)
        parts = [*system, _Part(SegmentKind.GLUE, "\n\n", trusted=True)] if system else []
        for role, content, _ in messages[:-1]:
            name = _Part(SegmentKind.GLUE, f"{role.capitalize()}: ", trusted=True)
            parts += [name, *content, _Part(SegmentKind.GLUE, "\n\n", trusted=True)]
        return [*parts, *messages[-1][1]]

    def _render_chat(
        self, messages: list[_Turn], generation_prompt: bool
    ) -> list[_Part]:
        parts = [part for _, content, _ in messages for part in content]
        numbers = iter(range(len(parts)))
        rendered_messages = [
            {"role": role, "content": "".join(f"@@BLEND-RAG-PART-{next(numbers)}@@" for _ in content), **extra}
            for role, content, extra in messages
        ]
        arguments = {
            "date_string": self._date.strftime("%d %b %Y"),
            "strftime_now": self._date.strftime,
            **self._template_kwargs,
        }
        try:
            text = self.tokenizer.source.apply_chat_template(
                rendered_messages, tokenize=False, add_generation_prompt=generation_prompt, **arguments
            )
        except Exception as error:  # templates raise whatever their author wrote
            msg = f"the chat template refuses these messages: {error}"
            raise PromptError(msg) from error
        pieces = _SENTINEL.split(text)  # template text and part numbers in turn
        shown = [int(number) for number in pieces[1::2]]
        if sorted(shown) != list(range(len(parts))):
            msg = "the chat template drops or repeats message content, so its prompts cannot be laid out exactly"
            raise PromptError(msg)
        woven = [_Part(SegmentKind.GLUE, pieces[0], trusted=True)]
        for number, literal in zip(shown, pieces[2::2], strict=True):
            woven += [parts[number], _Part(SegmentKind.GLUE, literal, trusted=True)]
        return woven

    def _tokenise(self, parts: list[_Part]) -> list[_Tokens]:
        """Ids of every part; adjoining template texts are one piece; a BOS in front where the tokenizer adds one."""
        pieces: list[_Tokens] = []
        glue = ""
        for part in [*parts, None]:
            if part is not None and part.trusted:
                glue += part.text
                continue
            if glue:
                pieces.append(_Tokens(SegmentKind.GLUE, glue, self.tokenizer.markup(glue)))
                glue = ""
            if part is None:
                break
            if part.passages is not None:
                pieces += self._tokenise_passages(part.passages)
            else:
                pieces.append(_Tokens(part.kind, part.text, self.tokenizer.literal(part.text)))
        bos = self.tokenizer.bos_ids
        leading = pieces[0].ids if pieces else ()
        if bos and leading[: len(bos)] != bos:
            pieces.insert(0, _Tokens(SegmentKind.GLUE, "", bos))
        return [piece for piece in pieces if piece.ids]

    def _tokenise_passages(
        self, passages: Passages
    ) -> list[_Tokens]:
        pieces: list[_Tokens] = []
        for number, passage in enumerate(passages.passages):
            if number and self.separator:
                pieces.append(_Tokens(SegmentKind.SEPARATOR, self.separator.text, self.separator.ids))
            ids = self.chunk_ids(passage.text)
            cuts = self.segmenter.pieces(ids)
            for cut in cuts:
                run = ids[cut.start : cut.end]
                text = passage.text if len(cuts) == 1 else self.tokenizer.decode(run)
                kind = SegmentKind.SEPARATOR if cut.separator else SegmentKind.CHUNK
                pieces.append(_Tokens(kind, text, run, passage.source))
        return pieces

    def _stable_prefix(self) -> tuple[int, ...]:
        """Everything that stands before the first question, history or chunk of a first turn."""
        fixed: list[_Part] = []
        for literal, name in self.template:
            if name:
                break
            fixed.append(_Part(SegmentKind.GLUE, literal, trusted=True))
        probe = _Part(SegmentKind.QUESTION, "x")
        parts = self._render([("user", [*fixed, probe], {})])
        pieces = self._tokenise(parts[: parts.index(probe)])
        return tuple(token_id for piece in pieces for token_id in piece.ids)


def _has_text(message: Message) -> bool:
    return any(isinstance(content, str) and content.strip() for content in message.content)


def _splice(
    pieces: list[_Tokens], prefix_ids: tuple[int, ...]
) -> PromptLayout:
    """Put pieces behind each other; those that make up the stable prefix become one segment."""
    token_ids = tuple(token_id for piece in pieces for token_id in piece.ids)
    segments: list[Segment] = []
    at = 0
    for kind, text, ids, source in pieces:
        segments.append(Segment(kind, at, at + len(ids), text, source))
        at += len(ids)
    width = len(prefix_ids)
    inside = [segment for segment in segments if segment.end <= width]
    if width and token_ids[:width] == prefix_ids and inside and inside[-1].end == width:
        text = "".join(segment.text for segment in inside)
        segments[: len(inside)] = [Segment(SegmentKind.PREFIX, 0, width, text)]
    return PromptLayout(token_ids, tuple(segments), prefix_ids)


def _parse_template(template: str) -> list[tuple[str, str]]:
    """[(literal text, ""), ("", field), …] of a template with `{context}` and `{question}` once each."""
    found: list[tuple[str, str]] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            if literal:
                found.append((literal, ""))
            if name is not None:
                if spec or conversion:
                    msg = "fields of a prompt template take no format: write {context} and {question}"
                    raise PromptError(msg)
                found.append(("", name))
    except ValueError as error:
        msg = f"the prompt template cannot be read ({error}): write literal braces as {{{{ and }}}}"
        raise PromptError(msg) from error
    names = sorted(name for _, name in found if name)
    if names != ["context", "question"]:
        msg = f"a prompt template holds {{context}} and {{question}} once each, this one has {names or 'neither'}"
        raise PromptError(msg)
    return found
