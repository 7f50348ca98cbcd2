"""Questions with passages to measure on, read from a file.

Knows texts and a prompt builder; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_rag.errors import CorpusError
from blend_rag.layout import Passage, PromptBuilder, PromptLayout


@dataclass(frozen=True, slots=True)
class Example:
    """A question, its passages in the order of the prompt, and answers that count as right (may be none)."""

    question: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()

    def layout(self, prompts: PromptBuilder) -> PromptLayout:
        """Its prompt."""
        return prompts.build(passages=self.passages, question=self.question)


def read_examples(
    path: Path, prompts: PromptBuilder, limit: int | None = None, passages: int = 6, passage_tokens: int = 256
) -> list[Example]:
    """Rows of a JSON-lines file with `question`, `passages` and perhaps `answers`.

    Args:
        path: the file.
        prompts: whose tokenizer cuts passages.
        limit: rows from the beginning; None takes all.
        passages: of each row, from the beginning.
        passage_tokens: longest passage; what is longer is cut.

    Raises:
        CorpusError: the file cannot be read, or a row is not such a row.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read ({error}): pass a JSON-lines file with question and passages in each row"
        raise CorpusError(msg) from error
    found = []
    for number, line in enumerate(lines[:limit], 1):
        row = _row(line, f"{path}, row {number}")
        cut = [_cut(text, prompts, passage_tokens) for text in row["passages"][:passages]]
        texts = [text for text in cut if text.strip()]
        found.append(
            Example(row["question"], tuple(Passage(text) for text in texts), tuple(map(str, row.get("answers") or ())))
        )
    if not found:
        msg = f"{path} holds no rows: each line is a JSON object with question and passages"
        raise CorpusError(msg)
    return found


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        msg = f"{where} is no JSON: {error}"
        raise CorpusError(msg) from error
    fits = (
        isinstance(row, dict)
        and isinstance(row.get("question"), str)
        and bool(row["question"].strip())
        and _texts(row.get("passages"))
        and any(text.strip() for text in row["passages"])
        and (row.get("answers") is None or _texts(row["answers"]))
    )
    if not fits:
        msg = f'{where} does not fit: write {{"question": "…", "passages": ["…", …], "answers": ["…"]}}'
        raise CorpusError(msg)
    return dict(row)


def _texts(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(text, str) for text in given)


def _cut(text: str, prompts: PromptBuilder, tokens: int) -> str:
    if not text.strip():
        return ""
    ids = prompts.chunk_ids(text)
    return text if len(ids) <= tokens else prompts.tokenizer.decode(ids[:tokens])
