"""Documents to ask about, cut into passages: the language reference every Python ships, or text files.

Knows texts and a way to count tokens; knows no model and no index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from blend_rag.errors import CorpusError
from blend_rag.layout import Passage

CountTokens = Callable[[str], int]
SUFFIXES = (".txt", ".md", ".rst")
MIN_TOKENS, MAX_TOKENS = 200, 300


def reference_passages(count_tokens: CountTokens) -> list[Passage]:
    """The topics of Python's language reference in passages of 200 to 300 tokens.

    A passage begins with its topic's heading. Topics too short for a passage share one. Sources read `topic:with#2`.
    """
    from pydoc_data import topics

    name_of: dict[str, str] = {}  # some topics are the same text under two names
    for name in sorted(topics.topics):
        name_of.setdefault(topics.topics[name].strip(), name)
    found: list[Passage] = []
    short: list[tuple[str, str]] = []
    for text, name in name_of.items():
        if count_tokens(text) < MIN_TOKENS:
            short.append((name, text))
        else:
            found += cut(text, f"topic:{name}", count_tokens)
    return found + _together(short, count_tokens)


def load_documents(paths: Iterable[Path], count_tokens: CountTokens) -> list[Passage]:
    """Passages of text files; folders are searched for `.txt`, `.md` and `.rst`.

    Sources read `notes.md#2`; documents are absolute paths.

    Raises:
        CorpusError: a path is missing or unreadable, or there is no text at all.
    """
    given = list(paths)
    found: list[Passage] = []
    for path in given:
        for file in _files(path):
            name = str(file.relative_to(path)) if path.is_dir() else file.name
            found += cut(_read(file), name, count_tokens, str(file.resolve()))
    if not found:
        where = ", ".join(map(str, given)) or "no path"
        msg = f"there are no documents in {where}: pass {', '.join(SUFFIXES)} files that hold text, or folders of them"
        raise CorpusError(msg)
    return found


def cut(text: str, source: str, count_tokens: CountTokens, document: str | None = None) -> list[Passage]:
    """Cut a document at paragraph and line borders into passages of 200 to 300 tokens.

    Every passage begins with the document's first line. The last one reaches back over lines of the one before, so
    that it is not too short; a document of fewer tokens is one passage.
    """
    lines = [piece for line in text.strip().splitlines() for piece in _pieces(line, count_tokens)]
    if not any(line.strip() for line in lines):
        return []
    heading = lines[0].strip()
    spans = _spans(lines, count_tokens, count_tokens(heading + "\n\n"))
    bodies = ["\n".join(lines[start:end]).strip("\n") for start, end in spans]
    texts = [body if number == 0 else f"{heading}\n\n{body}" for number, body in enumerate(bodies)]
    return [Passage(passage, f"{source}#{number}", document or source) for number, passage in enumerate(texts, 1)]


def _spans(lines: Sequence[str], count_tokens: CountTokens, heading: int) -> list[tuple[int, int]]:
    """Line spans [start, end) of each passage."""
    sizes = [count_tokens(line + "\n") for line in lines]
    spans: list[tuple[int, int]] = []
    start, tokens = 0, 0
    for at, size in enumerate(sizes):
        if tokens + size > MAX_TOKENS:
            spans.append((start, at))
            start, tokens = at, heading
        tokens += size
        if tokens >= MIN_TOKENS + 30 and not lines[at].strip():
            spans.append((start, at + 1))
            start, tokens = at + 1, heading
    if any(line.strip() for line in lines[start:]):
        while spans and start > 0 and tokens + sizes[start - 1] <= MAX_TOKENS and tokens < MIN_TOKENS + 10:
            start -= 1
            tokens += sizes[start]
        spans.append((start, len(lines)))
    return spans


def _pieces(line: str, count_tokens: CountTokens) -> Iterator[str]:
    """A line, or pieces of one that is too long to be packed well."""
    limit = MAX_TOKENS // 4
    if count_tokens(line) <= limit:
        yield line
        return
    piece = ""
    for word in line.split(" "):
        if piece and count_tokens(f"{piece} {word}") > limit:
            yield piece
            piece = word
        else:
            piece = f"{piece} {word}" if piece else word
    yield piece


def _together(named: Iterable[tuple[str, str]], count_tokens: CountTokens) -> list[Passage]:
    """Short documents joined until they make a passage."""
    found: list[Passage] = []
    names: list[str] = []
    body = ""
    for name, text in named:
        joined = f"{body}\n\n{text}" if body else text
        if body and count_tokens(joined) > MAX_TOKENS:
            found.append(Passage(body, f"topic:{'+'.join(names)}#1"))
            names, joined = [], text
        names.append(name)
        body = joined
    return [*found, Passage(body, f"topic:{'+'.join(names)}#1")] if body else found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not path.exists():
        msg = f"there is no file or folder {path}: check the path"
        raise CorpusError(msg)
    return [path]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text: convert it, or leave it out"
        raise CorpusError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}): check its permissions, or leave it out"
        raise CorpusError(msg) from error
