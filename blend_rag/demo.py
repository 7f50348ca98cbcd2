"""The main job on real input: ingest a corpus, warm its KV, answer questions, compare with full prefill."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.corpus import reference_passages
from blend_rag.engines.base import Engine, Generation
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.evaluation.fidelity import kl_to_full
from blend_rag.evaluation.report import plot_ttft
from blend_rag.evaluation.ttft import plain_prefill, time_interleaved
from blend_rag.layout import Passage, PromptBuilder, PromptLayout
from blend_rag.retrieval import Retriever

SYSTEM = "You answer questions about Python from passages of its language reference. Answer in one or two sentences."
QUESTIONS = (
    "What does the nonlocal statement do?",
    "When are the default parameter values of a function evaluated?",
    "Which method does the with statement call when its block ends?",
    "What is the difference between the is operator and ==?",
    "What happens when a finally clause executes a return statement?",
    "How does a class define what happens when its instance is called?",
    "Which exception does the import statement raise when a module is not found?",
)
REUSE_ONLY = RecomputePolicy(ratio=0.0, context="alone")
_TTFT_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Answered:
    """A question, what was retrieved for it, its prompt and its answer."""

    question: str
    passages: tuple[Passage, ...]
    layout: PromptLayout
    generation: Generation


@dataclass(frozen=True, slots=True)
class Library:
    """A corpus ready to be asked: engine, prompts and index."""

    engine: Engine
    prompts: PromptBuilder
    retriever: Retriever
    passages: tuple[Passage, ...]

    @classmethod
    def of_reference(cls, engine: Engine, *, show_progress: bool = True) -> Library:
        """Python's language reference, embedded and indexed."""
        prompts = PromptBuilder(engine.tokenizer, system=SYSTEM)
        passages = reference_passages(prompts.tokenizer.count)
        return cls.of(engine, prompts, passages, show_progress=show_progress)

    @classmethod
    def of(
        cls,
        engine: Engine,
        prompts: PromptBuilder,
        passages: Sequence[Passage],
        *,
        show_progress: bool = True,
    ) -> Library:
        """Given passages, embedded and indexed."""
        return cls(engine, prompts, Retriever(passages, show_progress=show_progress), tuple(passages))

    def answer(
        self, question: str, k: int, max_tokens: int, show: Callable[[str], object] = lambda text: None
    ) -> Answered:
        """Retrieve `k` passages and answer from them; `show` gets the answer's text as it arrives."""
        passages = tuple(hit.passage for hit in self.retriever.search(question, k))
        layout = self.prompts.build(passages=passages, question=question)
        generation = None
        for piece in self.engine.stream(layout, max_tokens=max_tokens):
            show(piece.text)
            generation = piece.generation
        assert generation is not None, "a stream ends with the whole generation"
        return Answered(question, passages, layout, generation)


def compare(library: Library, answered: Answered) -> dict[str, Any]:
    """Row of one question: its answer, tokens by fate, TTFT of both ways in turn, KL of the default and of reuse."""
    engine, layout = library.engine, answered.layout
    assert isinstance(engine, TransformersEngine), "full prefill is compared in the embedded engine"
    engine.warm(library.prompts, answered.passages, context="alone")  # what reuse alone needs
    timings = time_interleaved(
        {
            "full": lambda: plain_prefill(engine, layout),
            "blend": lambda: _blend_cold(engine, layout),
        },
        repeats=_TTFT_REPEATS,
    )
    default, reuse = kl_to_full(engine, layout, [engine.policy, REUSE_ONLY])
    report = answered.generation.report
    return {
        "question": answered.question,
        "answer": answered.generation.text,
        "sources": [passage.source for passage in answered.passages],
        "prompt_tokens": report.prompt_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "computed_tokens": report.computed_tokens,
        "ttft_full_s": timings["full"].median_s,
        "ttft_blend_s": timings["blend"].median_s,
        "kl_to_full": default.kl,
        "kl_reuse_only": reuse.kl,
    }


def _blend_cold(engine: TransformersEngine, layout: PromptLayout) -> None:
    """First token by blending, without exact KV that earlier runs of the same prompt left on the device."""
    engine.clear_hot()
    engine.generate(layout, max_tokens=1)


def run_demo(
    library: Library,
    questions: Sequence[str],
    *,
    k: int = 6,
    max_tokens: int = 96,
    show: Callable[[str], object] = lambda text: None,
    on_question: Callable[[str, int], object] = lambda question, number: None,
    on_answer: Callable[[Answered], object] = lambda answered: None,
) -> Iterator[dict[str, Any]]:
    """Answer every question while `show` prints, then yield the compared rows one by one."""
    done = []
    for number, question in enumerate(questions, 1):
        on_question(question, number)
        done.append(library.answer(question, k, max_tokens, show))
        on_answer(done[-1])
    for answered in done:
        yield compare(library, answered)


def summarise(engine: TransformersEngine, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole report from its rows."""
    names = ("blend-rag", "torch", "transformers", "sentence-transformers", "faiss-cpu")
    return {
        "model": engine.model_name,
        "device": engine.device_description,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "questions": [{name: value for name, value in row.items() if name != "kl_reuse_only"} for row in rows],
        "ttft_speedup_median": statistics.median(row["ttft_full_s"] / row["ttft_blend_s"] for row in rows),
        "kl_to_full_mean": statistics.fmean(row["kl_to_full"] for row in rows),
        "kl_reuse_only_mean": statistics.fmean(row["kl_reuse_only"] for row in rows),
    }


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write `report.json` and `ttft.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot_ttft(report["questions"], folder / "ttft.png")
