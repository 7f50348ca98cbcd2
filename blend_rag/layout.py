"""Prompts as token-exact segments.

Knows a tokenizer, never a model. Every segment is tokenised by itself and spliced as ids, so a chunk has the same ids
alone, at ingestion and in any prompt; documents, questions and history are literal text and cannot add control tokens.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise, takewhile
from string import Formatter
from typing import Any, NamedTuple, Protocol

from blend_rag.chat_template import ChatTemplate, TemplateText, Turn
from blend_rag.errors import PromptError
from blend_rag.separators import Separator
from blend_rag.tokenization import PromptTokenizer

DEFAULT_SEPARATOR = "\n\n"
DEFAULT_TEMPLATE = "{context}\n\n{question}"
_FROZEN_DATE = datetime.date(2024, 7, 26)
_NO_QUESTION = "the question is empty: pass a question with at least one word"


class SegmentKind(str, Enum):
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

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a layout, the text they came from and, for a chunk, its passage's source and document."""

    kind: SegmentKind
    start: int
    end: int
    text: str
    source: str | None = None
    document: str | None = None

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
        """The whole document."""
        return [Piece(0, len(token_ids))]


@dataclass(frozen=True, slots=True)
class SeparatorSegmenter:
    """Borders at every separator."""

    separator: Separator

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """Runs between separators, and the separators; none is empty."""
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
        """Windows of `size` tokens; the last may be shorter."""
        count = len(token_ids)
        return [Piece(start, min(start + self.size, count)) for start in range(0, count, self.size)]


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text, what it is cited as, and the id of the document whose deletion deletes its KV.

    `document` is `source` where it is not given.
    """

    text: str
    source: str | None = None
    document: str | None = None

    def __post_init__(self) -> None:
        if self.document is None:
            object.__setattr__(self, "document", self.source)


@dataclass(frozen=True, slots=True)
class Passages:
    """A group of retrieved passages standing together in a message, for example one tool result."""

    passages: tuple[Passage, ...]

    @classmethod
    def of(cls, passages: Iterable[Passage | str]) -> Passages:
        """A group from passages and plain texts.

        Raises:
            PromptError: `passages` is a single text.
        """
        if isinstance(passages, str):
            msg = "passages is one text: pass a list of passages"
            raise PromptError(msg)
        return cls(tuple(Passage(passage) if isinstance(passage, str) else passage for passage in passages))


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: its role and its content, text and groups of passages in any order.

    `extra` holds further fields the chat template may want, such as `tool_calls` or `name`. Content and extra are
    literal: a control token's name in them stays text.
    """

    role: str
    content: tuple[str | Passages, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.content, (str, Passages)):
            msg = "content of a message is a tuple: write Message.of(role, text, ...)"
            raise PromptError(msg)

    @classmethod
    def of(cls, role: str, *content: str | Passages, **extra: Any) -> Message:
        """A message from its parts."""
        return cls(role, content, extra)


@dataclass(frozen=True, slots=True)
class Markup:
    """Template text of the caller's own, in which names of control tokens count."""

    text: str


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
    document: str | None = None


class PromptBuilder:
    """Lays out prompts for one tokenizer and one stable prefix.

    Attributes:
        tokenizer: the `PromptTokenizer` in use.
        prefix_ids: ids of the stable prefix, behind which `warm` computes chunks: everything before the first
            question, history or chunk of a first turn. Only where history stands between it and a fixed instruction
            does a prompt begin with less of it.

    Args:
        tokenizer: the model's fast tokenizer.
        system: system text; part of the stable prefix. None leaves what the chat template puts there by itself.
        template: text with `{context}` and `{question}` once each, in either order. In chat mode it is the user
            message, otherwise the whole prompt. Text before the first of them is a fixed instruction.
        separator: what stands between chunks: any string, the name of one reserved token, or None. White space that
            the tokenizer does not represent stands for None.
        segmenter: where cache borders lie inside a document; by default a document is one chunk.
        chat: use the tokenizer's chat template; by default if it has one.
        template_kwargs: further arguments of the chat template, such as `enable_thinking`. Trusted like the template.
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
        self.template = template
        self.separator = _derive_separator(self.tokenizer, separator)
        self.segmenter: Segmenter = segmenter or DocumentSegmenter()
        self._template = _parse_template(template)
        self._chat_template = ChatTemplate(self.tokenizer, date, template_kwargs or {})
        first_turn = self._first_turn()
        self._bos_marks_turns = self.chat and self._count_bos(first_turn) > 1
        self.prefix_ids = self._stable_prefix(first_turn)

    @property
    def glue(self) -> str:
        """What stands between two chunks."""
        return self.separator.text if self.separator else ""

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
        """Ids of each separately cached piece of a passage, separators inside it left out.

        Raises:
            PromptError: the passage has no tokens, or the segmenter's pieces do not tile it.
        """
        ids = self.chunk_ids(text)
        return [ids[piece.start : piece.end] for piece in self._cut(ids) if not piece.separator]

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
            raise PromptError(_NO_QUESTION)
        fields = {
            "context": _Part(SegmentKind.CHUNK, passages=Passages.of(passages)),
            "question": _Part(SegmentKind.QUESTION, question),
        }
        asked = tuple(part if isinstance(part, _Part) else fields[part] for part in self._template)
        return self._lay_out([*_turns(history), Turn("user", asked)])

    def build_messages(self, messages: Sequence[Message]) -> PromptLayout:
        """Lay out a whole conversation; the last user message that holds text is the question.

        Raises:
            PromptError: there is no question, a passage is empty, or the chat template cannot show these messages.
        """
        asked = [i for i, message in enumerate(messages) if message.role == "user" and _has_text(message)]
        if not asked:
            msg = "the conversation holds no question: add a user message with text"
            raise PromptError(msg)
        return self._lay_out(_turns(messages, question_at=asked[-1]))

    def build_rendered(self, parts: Iterable[str | Markup | Passages]) -> PromptLayout:
        """Lay out a prompt whose template the caller has rendered; plain text is literal, and the question.

        Raises:
            PromptError: a passage is empty, or there is no text.
        """
        made = [
            _Part(SegmentKind.CHUNK, passages=part)
            if isinstance(part, Passages)
            else _Part(SegmentKind.GLUE, part.text, trusted=True)
            if isinstance(part, Markup)
            else _Part(SegmentKind.QUESTION, part)
            for part in parts
        ]
        pieces = self._tokenise(made)
        if not pieces:
            raise PromptError(_NO_QUESTION)
        return _splice(pieces, self.prefix_ids)

    def _lay_out(self, turns: list[Turn[_Part]]) -> PromptLayout:
        pieces = self._tokenise(self._render(turns))
        if all(piece.kind is not SegmentKind.QUESTION for piece in pieces):
            raise PromptError(_NO_QUESTION)
        return _splice(pieces, self.prefix_ids)

    def _render(self, turns: list[Turn[_Part]]) -> list[_Part]:
        """Parts of the whole prompt in order, template text included."""
        system = () if self.system is None else (_Part(SegmentKind.PREFIX, self.system),)
        if not self.chat:
            return _render_plain(system, turns)
        leading = [Turn("system", system)] if system else []
        return [
            _Part(SegmentKind.GLUE, item.text, trusted=not item.literal) if isinstance(item, TemplateText) else item
            for item in self._chat_template.weave([*leading, *turns])
        ]

    def _tokenise(self, parts: list[_Part]) -> list[_Tokens]:
        """Ids of every part; adjoining template texts are one piece; a BOS in front where the tokenizer adds one."""
        pieces: list[_Tokens] = []
        parts = _join_template_text(parts)
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if part.trusted:
                before_content = following is not None and following.kind is not SegmentKind.GLUE
                found = [self._tokenise_template_text(part.text, leads=not pieces, before_content=before_content)]
            elif part.passages is not None:
                found = self._tokenise_passages(part.passages)
            else:
                ids = self.tokenizer.literal(part.text, inside=part.kind is SegmentKind.GLUE)
                found = [_Tokens(part.kind, part.text, ids)]
            pieces += [piece for piece in found if piece.ids]
        bos = self.tokenizer.bos_ids
        if bos and (not pieces or pieces[0].ids[: len(bos)] != bos):
            pieces.insert(0, _Tokens(SegmentKind.GLUE, "", bos))
        return pieces

    def _tokenise_template_text(self, text: str, *, leads: bool, before_content: bool) -> _Tokens:
        written = text
        if before_content and self.tokenizer.adds_prefix_space:
            written = text.removesuffix(" ")  # what follows brings its own
        ids = self.tokenizer.markup(written, inside=not leads)
        bos = self.tokenizer.bos_ids
        if bos and not self._bos_marks_turns:
            front = len(bos) if leads and ids[: len(bos)] == bos else 0
            ids = ids[:front] + _without_run(ids[front:], bos)
        return _Tokens(SegmentKind.GLUE, text, ids)

    def _tokenise_passages(self, passages: Passages) -> list[_Tokens]:
        pieces: list[_Tokens] = []
        for number, passage in enumerate(passages.passages):
            if number and self.separator:
                pieces.append(_Tokens(SegmentKind.SEPARATOR, self.separator.text, self.separator.ids))
            ids = self.chunk_ids(passage.text)
            cuts = self._cut(ids)
            for cut, text in zip(cuts, self._texts(passage.text, cuts), strict=True):
                kind = SegmentKind.SEPARATOR if cut.separator else SegmentKind.CHUNK
                pieces.append(_Tokens(kind, text, ids[cut.start : cut.end], passage.source, passage.document))
        return pieces

    def _cut(self, ids: tuple[int, ...]) -> list[Piece]:
        pieces = [piece for piece in self.segmenter.pieces(ids) if piece.end > piece.start]
        if [piece.start for piece in pieces] + [len(ids)] != [0] + [piece.end for piece in pieces]:
            msg = "the segmenter's pieces do not tile the passage: each must start where the one before ends"
            raise PromptError(msg)
        return pieces

    def _texts(self, text: str, cuts: list[Piece]) -> list[str]:
        """The text of each cut; together they are `text`, whatever decoding would lose."""
        if len(cuts) == 1:
            return [text]
        offsets = self.tokenizer.literal_encoding(text).offsets
        borders = [0, *(offsets[cut.start][0] for cut in cuts[1:]), len(text)]
        return [text[start:end] for start, end in pairwise(borders)]

    def _first_turn(self) -> list[_Part]:
        """Parts of a first turn's prompt up to and including a stand-in for its first content."""
        content = _Part(SegmentKind.QUESTION, "x")
        parts = [part if isinstance(part, _Part) else content for part in self._template]
        return self._render([Turn("user", tuple(parts[: parts.index(content) + 1]))])

    def _count_bos(self, parts: list[_Part]) -> int:
        bos = self.tokenizer.bos_ids
        texts = [self.tokenizer.markup(part.text) for part in _join_template_text(parts) if part.trusted]
        return sum(len(ids) - len(_without_run(ids, bos)) for ids in texts) // len(bos) if bos else 0

    def _stable_prefix(self, first_turn: list[_Part]) -> tuple[int, ...]:
        pieces = takewhile(lambda piece: piece.kind is not SegmentKind.QUESTION, self._tokenise(first_turn))
        return tuple(token_id for piece in pieces for token_id in piece.ids)


def _derive_separator(tokenizer: PromptTokenizer, text: str | None) -> Separator | None:
    if text is None:
        return None
    ids = tokenizer.literal(text)
    if text.isspace() and (not ids or tokenizer.unk_id in ids):
        return None  # the tokenizer would lose it between two words as well
    return Separator.derive(tokenizer, text)


def _has_text(message: Message) -> bool:
    return any(isinstance(content, str) and content.strip() for content in message.content)


def _turns(messages: Sequence[Message], question_at: int | None = None) -> list[Turn[_Part]]:
    turns = []
    for i, message in enumerate(messages):
        kind = SegmentKind.QUESTION if i == question_at else SegmentKind.HISTORY
        parts = [
            _Part(SegmentKind.CHUNK, passages=content) if isinstance(content, Passages) else _Part(kind, content)
            for content in message.content
        ]
        turns.append(Turn(message.role, tuple(parts), message.extra))
    return turns


def _render_plain(system: tuple[_Part, ...], turns: list[Turn[_Part]]) -> list[_Part]:
    """System text, the turns before the last with their roles, and the last as it is, a blank line between them."""
    gap = _Part(SegmentKind.GLUE, "\n\n", trusted=True)
    parts = [*system, gap] if system else []
    for turn in turns[:-1]:
        parts += [_Part(SegmentKind.GLUE, f"{turn.role.capitalize()}: ", trusted=True), *turn.content, gap]
    return [*parts, *turns[-1].content]


def _join_template_text(parts: list[_Part]) -> list[_Part]:
    joined: list[_Part] = []
    for part in parts:
        if part.trusted and joined and joined[-1].trusted:
            part = _Part(SegmentKind.GLUE, joined.pop().text + part.text, trusted=True)
        joined.append(part)
    return joined


def _without_run(ids: tuple[int, ...], run: tuple[int, ...]) -> tuple[int, ...]:
    """`ids` without any occurrence of `run`."""
    kept: list[int] = []
    at = 0
    while at < len(ids):
        if ids[at : at + len(run)] == run:
            at += len(run)
        else:
            kept.append(ids[at])
            at += 1
    return tuple(kept)


def _splice(pieces: list[_Tokens], prefix_ids: tuple[int, ...]) -> PromptLayout:
    """Put pieces behind each other; leading template and system text in common with the prefix is one segment."""
    token_ids = tuple(token_id for piece in pieces for token_id in piece.ids)
    segments: list[Segment] = []
    at = 0
    for kind, text, ids, source, document in pieces:
        segments.append(Segment(kind, at, at + len(ids), text, source, document))
        at += len(ids)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, prefix_ids, strict=False)))
    stable = (SegmentKind.GLUE, SegmentKind.PREFIX)
    leading = list(takewhile(lambda segment: segment.kind in stable and segment.end <= common, segments))
    if leading:
        text = "".join(segment.text for segment in leading)
        segments[: len(leading)] = [Segment(SegmentKind.PREFIX, 0, leading[-1].end, text)]
    return PromptLayout(token_ids, tuple(segments), prefix_ids)


def _parse_template(template: str) -> list[_Part | str]:
    """Literal parts and names of fields of a template that holds `{context}` and `{question}` once each."""
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        msg = f"the prompt template cannot be read ({error}): write literal braces as {{{{ and }}}}"
        raise PromptError(msg) from error
    if any(spec or conversion for _, _, spec, conversion in fields):
        msg = "fields of a prompt template take no format: write {context} and {question}"
        raise PromptError(msg)
    names = [name for _, name, _, _ in fields if name is not None]
    if sorted(names) != ["context", "question"]:
        found = ", ".join(f"{{{name}}}" for name in names) or "neither"
        msg = f"a prompt template holds {{context}} and {{question}} once each, this one has {found}"
        raise PromptError(msg)
    parsed: list[_Part | str] = []
    for text, name, _, _ in fields:
        parsed += [_Part(SegmentKind.GLUE, text, trusted=True)] if text else []
        parsed += [name] if name is not None else []
    return parsed
