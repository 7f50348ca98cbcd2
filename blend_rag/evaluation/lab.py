"""A fidelity run: policies over prompts, a document at a time, so that a run that was broken off goes on.

Every document's figures are written down as soon as they are known; the report is made from them at the end.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.evaluation.arms import BASELINE, FULL, FULL_ARM, REUSE_ARM, Arm
from blend_rag.evaluation.bootstrap import difference, gap_closed, interval, mean
from blend_rag.evaluation.examples import Example
from blend_rag.evaluation.fidelity import FORCED_TOKENS, Reference, exact_match, f1
from blend_rag.evaluation.probes import ProbeTask
from blend_rag.evaluation.ttft import plain_prefill
from blend_rag.layout import PromptBuilder, PromptLayout

Figures = dict[str, float]
"""One arm on one document, by name: kl, top1, kl_answer, nll_answer, f1, em, ttft_s."""


@dataclass(frozen=True, slots=True)
class FidelityRun:
    """What to measure.

    Attributes:
        arms: policies; full prefill and reuse alone are among them.
        timed: how many documents to take times on, from the beginning.
        answers: also let every policy answer, and score the text where right answers are known.
        tokens: forced tokens.
        seed: of the intervals.
        only_gold: measure at the right answer alone, as probes do.
    """

    arms: tuple[Arm, ...]
    timed: int = 10
    answers: bool = False
    tokens: int = FORCED_TOKENS
    seed: int = 0
    only_gold: bool = False

    def measure(
        self,
        engine: TransformersEngine,
        prompts: PromptBuilder,
        examples: Sequence[Example],
        checkpoint: Path | None = None,
        *,
        title: str = "documents",
        show_progress: bool = False,
    ) -> list[dict[str, Figures]]:
        """Figures of every arm, by key, for each example.

        Args:
            engine: the model; passages are warmed in its store.
            prompts: lays the prompts out.
            examples: what to ask.
            checkpoint: a file that holds what is done; one of another run is replaced.
            title: of the progress bar.
            show_progress: a bar over documents.

        Raises:
            PromptTooLongError: a prompt does not fit into the model's context.
        """
        done = _Checkpoint.open(checkpoint, self._digest(engine, prompts, examples))
        left = range(len(done.rows), len(examples))
        with tqdm(
            total=len(examples), initial=len(done.rows), desc=title, unit="doc", disable=not show_progress
        ) as bar:
            for number in left:
                done.add(self._one(engine, prompts, examples[number], number))
                bar.update()
        return done.rows

    def _digest(self, engine: TransformersEngine, prompts: PromptBuilder, examples: Sequence[Example]) -> str:
        """Names this run: a checkpoint of any other one is of no use to it."""
        said = {
            "model": engine.fingerprint,
            "prefix": prompts.prefix_ids,
            "arms": [[arm.selector, asdict(arm.policy)] for arm in self.arms],
            "examples": [asdict(example) for example in examples],
            "how": [self.timed, self.answers, self.tokens, self.only_gold],
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def _one(
        self, engine: TransformersEngine, prompts: PromptBuilder, example: Example, number: int
    ) -> dict[str, Figures]:
        for context in sorted({arm.policy.context for arm in self.arms}):
            engine.warm(prompts, example.passages, context=context)
        layout = example.layout(prompts)
        gold = prompts.tokenizer.literal(example.answers[0]) if example.answers else ()
        reference = Reference.of(engine, layout, gold, 1 if self.only_gold else self.tokens)
        found = {arm.key: self._figures(engine, reference, example, arm) for arm in self.arms}
        if number < self.timed:
            for round_number in range(2):  # the first warms up
                for arm in self.arms:
                    started = time.perf_counter()
                    _first_token(engine, layout, arm)
                    if round_number:
                        found[arm.key]["ttft_s"] = time.perf_counter() - started
        return found

    def _figures(self, engine: TransformersEngine, reference: Reference, example: Example, arm: Arm) -> Figures:
        measured = reference.measure(engine, arm.policy)
        found = {} if self.only_gold else {"kl": measured.kl, "top1": measured.top1}
        if measured.kl_answer is not None and measured.nll_answer is not None:
            found |= {"kl_answer": measured.kl_answer, "nll_answer": measured.nll_answer}
        if self.answers and example.answers:
            said = engine.generate(reference.layout, max_tokens=self.tokens, policy=arm.policy).text
            found |= {"f1": f1(said, example.answers), "em": exact_match(said, example.answers)}
        return found


def _first_token(engine: TransformersEngine, layout: PromptLayout, arm: Arm) -> None:
    """Full prefill is timed as transformers does it, without any code of ours."""
    if arm.selector == FULL:
        plain_prefill(engine, layout)
    else:
        engine.generate(layout, max_tokens=1, policy=arm.policy)


@dataclass(slots=True)
class _Checkpoint:
    """Finished documents, a line each behind a line that names the run."""

    path: Path | None
    rows: list[dict[str, Figures]]

    @classmethod
    def open(cls, path: Path | None, digest: str) -> _Checkpoint:
        if path is None:
            return cls(None, [])
        rows = list(_read_rows(path, digest))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.new")
        lines = [json.dumps({"run": digest}), *map(json.dumps, rows)]
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        unfinished.replace(path)  # without the half line that a crash may have left
        return cls(path, rows)

    def add(self, row: dict[str, Figures]) -> None:
        self.rows.append(row)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")


def _read_rows(path: Path, digest: str) -> Iterator[dict[str, Figures]]:
    """Whole lines of a checkpoint of this very run."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        if not lines or json.loads(lines[0]) != {"run": digest}:
            return
        for line in lines[1:]:
            yield json.loads(line)
    except (OSError, ValueError):
        return


# Reports


def summarise(rows: Sequence[dict[str, Figures]], arms: Sequence[Arm], seed: int = 0) -> list[dict[str, Any]]:
    """One dict for each arm: means over documents with 95 % intervals, gap closed, TTFT against full prefill."""
    reuse = [row[REUSE_ARM.key]["kl"] for row in rows]
    return [_summary(rows, arm, reuse, seed) for arm in arms]


def _summary(rows: Sequence[dict[str, Figures]], arm: Arm, reuse: list[float], seed: int) -> dict[str, Any]:
    kl = [row[arm.key]["kl"] for row in rows]
    found = {
        **arm.as_dict(),
        "kl32": statistics.fmean(kl),
        "kl32_ci": interval([kl], mean, seed),
        "top1": statistics.fmean(row[arm.key]["top1"] for row in rows),
        "gap_closed": 1 - statistics.fmean(kl) / statistics.fmean(reuse),
        "gap_closed_ci": interval([kl, reuse], gap_closed, seed),
        "ttft_speedup": _speedup(rows, arm),
    }
    for name in ("kl_answer", "nll_answer", "f1", "em"):
        values = [row[arm.key][name] for row in rows if name in row[arm.key]]
        if values:
            found[name] = statistics.fmean(values)
    baseline = f"{BASELINE} {arm.policy.ratio:g} prefix"
    if arm.selector not in (FULL, BASELINE) and baseline in rows[0]:
        found["kl32_minus_k_deviation_ci"] = interval([kl, [row[baseline]["kl"] for row in rows]], difference, seed)
    return found


def _speedup(rows: Sequence[dict[str, Figures]], arm: Arm) -> float | None:
    """Median over documents of full prefill's time to the first token over the arm's."""
    times = [(row[FULL_ARM.key]["ttft_s"], row[arm.key]["ttft_s"]) for row in rows if "ttft_s" in row[arm.key]]
    return statistics.median(full / own for full, own in times) if times else None


def summarise_probe(
    task: ProbeTask, rows: Sequence[dict[str, Figures]], arms: Sequence[Arm], seed: int = 0
) -> list[dict[str, Any]]:
    """One dict for each arm of a probe: figures at the answer, and the gap closed there."""
    reuse = [row[REUSE_ARM.key]["kl_answer"] for row in rows]
    summarised = []
    for arm in arms:
        kl = [row[arm.key]["kl_answer"] for row in rows]
        summarised.append(
            {
                "task": task.name,
                **arm.as_dict(),
                "kl_answer": statistics.fmean(kl),
                "nll_answer": statistics.fmean(row[arm.key]["nll_answer"] for row in rows),
                "gap_closed": 1 - statistics.fmean(kl) / statistics.fmean(reuse),
                "gap_closed_ci": interval([kl, reuse], gap_closed, seed),
            }
        )
    return summarised


def default_arm(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of the policy that holds where nobody chooses one."""
    wanted = Arm(RecomputePolicy().selector, RecomputePolicy()).as_dict()
    return next(arm for arm in arms if all(arm[name] == value for name, value in wanted.items()))
