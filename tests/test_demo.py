"""The demo's parts on a small library: answers with sources, compared rows, report and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blend_rag.demo import SYSTEM, Library, run_demo, summarise, write_report
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import CorpusError
from blend_rag.layout import Passage, PromptBuilder
from blend_rag.retrieval import Retriever

TEXTS = {
    "cape": "The lighthouse on the northern cape was finished in 1871 and is painted red and white.",
    "ferry": "The ferry to the islands leaves at six in the morning and takes four hours.",
    "tugs": "Every spring the harbour is cleared of ice by two tugs called Anna and Berta.",
    "bread": "Rye bread is baked on Fridays in the old bakery beside the church.",
}
PASSAGES = [Passage(text, source) for source, text in TEXTS.items()]


@pytest.fixture(scope="module")
def library(engine: TransformersEngine) -> Library:
    made = Library.of(engine, PromptBuilder(engine.tokenizer, system=SYSTEM), PASSAGES, show_progress=False)
    engine.warm(made.prompts, PASSAGES)
    return made


def test_retriever_finds_passages_by_meaning() -> None:
    retriever = Retriever(PASSAGES)
    hits = retriever.search("At what time does the boat depart?", k=2)
    assert hits[0].passage.source == "ferry"
    assert hits[0].score > hits[1].score
    assert len(retriever.search("anything", k=99)) == 4
    with pytest.raises(CorpusError, match="no passages"):
        Retriever([])


@pytest.mark.slow
def test_demo_answers_compares_and_writes_its_report(library: Library, tmp_path: Path) -> None:
    questions = ("When was the lighthouse finished?", "What are the tugs called?")
    shown: list[str] = []
    told: list[str] = []
    rows = list(
        run_demo(
            library,
            questions,
            k=3,
            max_tokens=24,
            show=shown.append,
            on_question=lambda question, number: told.append(f"{number} {question}"),
            on_answer=lambda answered: told.append("".join(shown)),
        )
    )
    assert told[0] == "1 When was the lighthouse finished?"
    assert told[1] == rows[0]["answer"]
    assert "1871" in rows[0]["answer"]
    report = summarise(library.engine, rows)
    write_report(report, tmp_path / "demo")
    written = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert set(written) == {
        "model",
        "device",
        "versions",
        "questions",
        "ttft_speedup_median",
        "kl_to_full_mean",
        "kl_reuse_only_mean",
    }
    assert set(written["questions"][0]) == {
        "question",
        "answer",
        "sources",
        "prompt_tokens",
        "reused_tokens",
        "recomputed_tokens",
        "computed_tokens",
        "ttft_full_s",
        "ttft_blend_s",
        "kl_to_full",
    }
    for row in written["questions"]:
        assert row["reused_tokens"] + row["recomputed_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        assert len(row["sources"]) == 3
        assert row["ttft_full_s"] > 0
        assert row["kl_to_full"] >= 0
    assert written["kl_reuse_only_mean"] > written["kl_to_full_mean"]
    assert (tmp_path / "demo" / "ttft.png").read_bytes().startswith(b"\x89PNG")
