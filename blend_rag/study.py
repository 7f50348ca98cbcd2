"""A whole fidelity study: documents, policies, probes, and the report that `blend-rag fidelity` writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blend_rag.corpus import reference_passages
from blend_rag.demo import QUESTIONS as DEMO_QUESTIONS
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PolicyError
from blend_rag.evaluation.arms import Arm, make_arms
from blend_rag.evaluation.examples import Example, read_examples
from blend_rag.evaluation.lab import FidelityRun, default_arm, summarise, summarise_probe
from blend_rag.evaluation.probes import probe_tasks
from blend_rag.folders import cache_folder
from blend_rag.layout import PromptBuilder
from blend_rag.retrieval import Retriever

SYSTEM = "Answer the question from the passages."
QUESTIONS = (
    *DEMO_QUESTIONS,
    "How are chained comparisons evaluated?",
    "What is the result of the modulo operator with a negative operand?",
    "How does a for loop know that its iterator is exhausted?",
    "What are the rules for mangling private names in a class?",
    "Which objects can be used as keys of a dictionary?",
)
"""Asked where no data is given."""


@dataclass(frozen=True, slots=True)
class Study:
    """What to measure; two with the same fields measure the same.

    Attributes:
        data: JSON-lines file; None asks built-in questions about Python's language reference.
        limit: documents, from the beginning.
        ratios: shares to recompute.
        selectors: rules to compare.
        probes: prompts of each made-up task; 0 leaves them out.
        answers: let every policy answer, and score the text.
        passages: of each document.
        passage_tokens: longest passage.
        timed: documents to take times on.
        tokens: forced tokens of each document.
        seed: of the random rule, the made-up tasks and the intervals.

    Raises:
        PolicyError: a value makes no sense.
    """

    data: Path | None = None
    limit: int = 40
    ratios: tuple[float, ...] = (0.15, 0.3)
    selectors: tuple[str, ...] = ()
    probes: int = 0
    answers: bool = False
    passages: int = 6
    passage_tokens: int = 256
    timed: int = 10
    tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ratios:
            msg = "there are no ratios to measure: pass for example 0.15,0.3"
            raise PolicyError(msg)
        self.arms()

    def arms(self) -> tuple[Arm, ...]:
        """The policies to compare."""
        return make_arms(self.ratios, self.selectors, seed=self.seed)

    def run(self, engine: TransformersEngine, *, show_progress: bool = False) -> dict[str, Any]:
        """Measure, from where an earlier run of this study stopped.

        Raises:
            CorpusError: the data cannot be read.
            PromptTooLongError: a prompt does not fit into the model's context.
        """
        arms = self.arms()
        prompts = PromptBuilder(engine.tokenizer, system=SYSTEM)
        examples = self._examples(prompts)
        run = FidelityRun(arms, timed=self.timed, answers=self.answers, tokens=self.tokens)
        rows = run.measure(engine, prompts, examples, self._progress("documents"), show_progress=show_progress)
        summary = summarise(rows, arms, self.seed)
        return {
            "model": engine.model_name,
            "data": self.data.name if self.data else "python-language-reference",
            "documents": len(rows),
            "arms": summary,
            "default": default_arm(summary),
            "probes": self._probe(engine, prompts, show_progress),
            "tokens": self.tokens,
            "seed": self.seed,
            "versions": {name: version(name) for name in ("blend-rag", "torch", "transformers")},
        }

    def _examples(self, prompts: PromptBuilder) -> Sequence[Example]:
        if self.data is None:
            retriever = Retriever(reference_passages(prompts.tokenizer.count), show_progress=True)
            return [
                Example(question, tuple(hit.passage for hit in retriever.search(question, self.passages)))
                for question in QUESTIONS[: self.limit]
            ]
        return read_examples(self.data, prompts, self.limit, self.passages, self.passage_tokens)

    def _probe(self, engine: TransformersEngine, prompts: PromptBuilder, show_progress: bool) -> list[dict[str, Any]]:
        """Policies at the first ratio on made-up tasks."""
        if not self.probes:
            return []
        arms = tuple(arm for arm in self.arms() if arm.policy.ratio in (0.0, self.ratios[0]) or not arm.policy.reuse)
        run = FidelityRun(arms, timed=0, only_gold=True)
        found: list[dict[str, Any]] = []
        for task in probe_tasks(self.seed, self.probes):
            progress = self._progress(task.name)
            rows = run.measure(engine, prompts, task.examples, progress, title=task.name, show_progress=show_progress)
            found += summarise_probe(task, rows, arms, self.seed)
        return found

    def _progress(self, part: str) -> Path:
        """File of what is done of this study."""
        said = json.dumps(asdict(self), default=str, sort_keys=True)
        return cache_folder() / "fidelity" / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}-{part}.jsonl"

    def forget_progress(self) -> None:
        """Delete what an interrupted run left, once its report is written."""
        parts = ["documents", *(task.name for task in probe_tasks(self.seed, 1))]
        for part in parts:
            self._progress(part).unlink(missing_ok=True)
