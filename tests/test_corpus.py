"""Passages have the promised size, nothing of a document is lost, and bad input is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from blend_rag.corpus import cut, load_documents, reference_passages
from blend_rag.errors import CorpusError


def words(text: str) -> int:
    """A token count that needs no tokenizer: words and line ends."""
    return len(text.split()) + text.count("\n")


def test_reference_is_cut_into_passages_of_200_to_300_tokens() -> None:
    passages = reference_passages(words)
    sizes = [words(passage.text) for passage in passages]
    assert len(passages) > 200
    assert max(sizes) <= 305  # words at a border may count once more
    assert sum(size >= 200 for size in sizes) / len(sizes) > 0.9
    assert len({passage.source for passage in passages}) == len(passages)
    named = {passage.source: passage.text for passage in passages}
    assert named["topic:with#1"].startswith('The "with" statement\n')
    assert any(source.startswith("topic:await+") for source in named)


def test_no_line_of_a_document_is_lost_and_every_passage_has_its_heading() -> None:
    lines = [f"line {number} of the long document" for number in range(300)]
    passages = cut("\n".join(["Heading", *lines]), "doc", words)
    text = "\n".join(passage.text for passage in passages)
    assert all(line in text for line in lines)
    assert all(passage.text.startswith("Heading") for passage in passages)
    assert [passage.source for passage in passages][:2] == ["doc#1", "doc#2"]


def test_a_single_endless_line_is_cut_too() -> None:
    passages = cut("word " * 1000, "doc", words)
    assert len(passages) > 3
    assert all(words(passage.text) <= 400 for passage in passages)


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.md").write_text("Alpha text")
    (tmp_path / "sub" / "b.txt").write_text("Beta text")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    found = load_documents([tmp_path], words)
    assert [(p.source, p.text) for p in found] == [("a.md#1", "Alpha text"), ("sub/b.txt#1", "Beta text")]


def test_missing_empty_and_binary_files_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="there is no file or folder"):
        load_documents([tmp_path / "none.txt"], words)
    with pytest.raises(CorpusError, match="no documents"):
        load_documents([tmp_path], words)
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(CorpusError, match="no documents"):
        load_documents([tmp_path], words)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(CorpusError, match="not UTF-8"):
        load_documents([tmp_path / "latin.txt"], words)
