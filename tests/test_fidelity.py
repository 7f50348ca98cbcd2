"""The measure of fidelity, the lab around it, and that quality rises with the ratio on real questions."""

from __future__ import annotations

import copy
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blend_rag import FULL_PREFILL, PromptBuilder, RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import CorpusError, PolicyError, PromptTooLongError
from blend_rag.evaluation.arms import FULL_ARM, REUSE_ARM, make_arms
from blend_rag.evaluation.bootstrap import difference, gap_closed, interval, mean
from blend_rag.evaluation.examples import Example, read_examples
from blend_rag.evaluation.fidelity import exact_match, f1, kl_to_full
from blend_rag.evaluation.lab import FidelityRun
from blend_rag.layout import Passage
from blend_rag.study import Study

REUSE = RecomputePolicy(ratio=0.0, context="alone")
PASSAGES = [
    "Anna Lund was born in Visby and moved to Oslo at the age of nine with her two sisters.",
    "The author of The Long Tide studied in the city where she had moved as a child.",
    "The Long Tide, a novel of 1987, was written by Anna Lund and won two prizes.",
]


def test_kl_is_zero_for_full_prefill_and_at_ratio_one_and_positive_for_reuse(
    engine: TransformersEngine, prompts: PromptBuilder
) -> None:
    for context in ("prefix", "alone"):
        engine.warm(prompts, PASSAGES, context=context)
    layout = prompts.build(passages=PASSAGES, question="Where did the author of The Long Tide study?")
    results = kl_to_full(engine, layout, [FULL_PREFILL, RecomputePolicy(ratio=1.0), REUSE], tokens=8)
    assert results[0].kl == pytest.approx(0.0, abs=1e-6)
    assert results[1].kl == pytest.approx(0.0, abs=1e-5)
    assert results[2].kl > 1e-3
    assert [result.top1 for result in results[:2]] == [1.0, 1.0]


def test_kl_refuses_prompts_without_room_for_the_answer(engine: TransformersEngine, prompts: PromptBuilder) -> None:
    layout = prompts.build(passages=["word " * 8150], question="?")
    with pytest.raises(PromptTooLongError, match="exceed the model's 8192"):
        kl_to_full(engine, layout, [REUSE])


RIGHT = "Oslo"
EXAMPLE = Example("Where did the author of The Long Tide study?", tuple(map(Passage, PASSAGES)), (RIGHT,))


def test_a_right_answer_is_forced_too(engine: TransformersEngine, prompts: PromptBuilder) -> None:
    run = FidelityRun(make_arms((1.0,), ("first-k",), alone=False), timed=0, tokens=4)
    [row] = run.measure(engine, prompts, [EXAMPLE])
    full, everything, reuse = row[FULL_ARM.key], row["first-k 1 prefix"], row[REUSE_ARM.key]
    assert full["kl"] == full["kl_answer"] == pytest.approx(0.0, abs=1e-6)
    assert full["nll_answer"] > 0
    assert everything["kl_answer"] == pytest.approx(0.0, abs=1e-5)
    assert everything["nll_answer"] == pytest.approx(full["nll_answer"], abs=1e-3)
    assert reuse["kl_answer"] > 1e-3
    assert abs(reuse["nll_answer"] - full["nll_answer"]) > 1e-3


def data(folder: Path) -> Path:
    """Two rows of which every policy gets one wrong."""
    path = folder / "rows.jsonl"
    rows = [
        {"question": EXAMPLE.question, "passages": PASSAGES, "answers": [RIGHT]},
        {"question": "Who wrote The Long Tide?", "passages": PASSAGES[::-1], "answers": ["Anna Lund"]},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    bare = copy.deepcopy(report)
    for arm in [*bare["arms"], bare["default"]]:
        arm["ttft_speedup"] = None
    return bare


def test_one_seed_gives_one_report_up_to_times(engine: TransformersEngine, tmp_path: Path) -> None:
    study = Study(
        data=data(tmp_path), selectors=("random", "k-deviation", "query-guided"), tokens=4, timed=1, answers=True
    )
    first, again = (_forgetting(study, engine) for _ in range(2))
    assert first["documents"] == 2
    assert without_times(first) == without_times(again)
    for arm in first["arms"]:
        assert arm["ttft_speedup"] > 0
        assert arm["kl32_ci"][0] <= arm["kl32"] <= arm["kl32_ci"][1]
        assert {"top1", "gap_closed", "kl_answer", "nll_answer", "f1", "em"} <= set(arm)
    assert first["default"] in first["arms"]
    assert (first["default"]["selector"], first["default"]["ratio"]) == (
        RecomputePolicy().selector,
        RecomputePolicy().ratio,
    )
    other = _forgetting(replace(study, seed=1), engine)
    kl = {seed: [arm["kl32"] for arm in report["arms"]] for seed, report in (("0", first), ("1", other))}
    assert kl["0"] != kl["1"], "the random rule follows the seed"


def _forgetting(study: Study, engine: TransformersEngine) -> dict[str, Any]:
    report = study.run(engine)
    study.forget_progress()
    return report


def test_a_run_goes_on_where_it_stopped(
    engine: TransformersEngine, prompts: PromptBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FidelityRun(make_arms((0.5,), ("first-k",), alone=False), timed=0, tokens=2)
    examples = [replace(EXAMPLE, question=f"{EXAMPLE.question} ({number})") for number in range(3)]
    checkpoint = tmp_path / "done.jsonl"
    measured: list[int] = []
    one = FidelityRun._one

    def until_the_third(self: FidelityRun, *arguments: Any) -> Any:
        number = arguments[-1]
        if number == 2 and len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(number)
        return one(self, *arguments)

    monkeypatch.setattr(FidelityRun, "_one", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        run.measure(engine, prompts, examples, checkpoint)
    with checkpoint.open("a") as file:
        file.write('{"first-k 0.5')  # the machine died in the middle of a line
    measured.append(-1)
    rows = run.measure(engine, prompts, examples, checkpoint)
    assert measured == [0, 1, -1, 2]
    assert run.measure(engine, prompts, examples, checkpoint) == rows == run.measure(engine, prompts, examples)
    measured.clear()
    replace(run, tokens=3).measure(engine, prompts, examples[:1], checkpoint)
    assert measured == [0], "a checkpoint of another run is not taken for this one's"


def test_arms_are_told_apart_and_hold_every_baseline() -> None:
    arms = make_arms((0.15, 0.3), ("k-deviation", "first-k", "query-guided", "random"))
    keys = [arm.key for arm in arms]
    assert len(set(keys)) == len(keys)
    assert {
        "full 1 prefix",
        "reuse 0 alone",
        "reuse 0 prefix",
        "reuse 0 alone positions not corrected",
        "k-deviation 0.15 prefix layer 3 narrowed",
        "first-k 0.3 prefix",
        "query-guided 0.15 alone",
    } <= set(keys)
    assert RecomputePolicy() in [arm.policy for arm in make_arms((0.4,), ("first-k",))], (
        "the default is always measured"
    )
    with pytest.raises(PolicyError, match="choose one of"):
        make_arms((0.15,), ("magic",))
    with pytest.raises(PolicyError, match="no ratios"):
        Study(ratios=())


def test_intervals_shrink_with_agreement_and_pair_documents() -> None:
    same = [0.5] * 20
    assert interval([same], mean) == (0.5, 0.5)
    noisy = [float(number) for number in range(20)]
    low, high = interval([noisy], mean)
    assert low < 9.5 < high
    assert high - low == pytest.approx(2 * 1.96 * 5.77 / 20**0.5, rel=0.1)  # what the normal distribution says
    shifted = [value + 0.1 for value in noisy]
    assert interval([shifted, noisy], difference) == pytest.approx((0.1, 0.1)), "documents are taken in pairs"
    assert interval([[0.25 * value for value in noisy], noisy], gap_closed) == pytest.approx((0.75, 0.75))
    assert interval([noisy], mean, seed=1) != interval([noisy], mean, seed=2)


def test_answers_are_scored_by_words() -> None:
    assert exact_match("The Exeter College.", ["exeter college"]) == 1.0
    assert exact_match("in Exeter College", ["Exeter College"]) == 0.0
    assert f1("in Exeter College", ["Trinity", "Exeter College"]) == pytest.approx(2 * 2 / 5)
    assert f1("no idea", ["Oslo"]) == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no rows"),
        ("{", "row 1 is no JSON"),
        ('{"question": "Who?"}', "row 1 does not fit"),
        ('{"question": "Who?", "passages": "one text"}', "row 1 does not fit"),
        ('{"question": "Who?", "passages": [" "]}', "row 1 does not fit"),
        ('{"question": "Who?", "passages": ["a"], "answers": "b"}', "row 1 does not fit"),
    ],
)
def test_bad_data_is_refused_by_row(prompts: PromptBuilder, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=words):
        read_examples(path, prompts)
    with pytest.raises(CorpusError, match="cannot be read"):
        read_examples(tmp_path / "none.jsonl", prompts)


def test_long_passages_are_cut_and_empty_ones_left_out(prompts: PromptBuilder, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Who?", "passages": ["word " * 50, "", "short", "fourth"]}))
    [example] = read_examples(path, prompts, passages=3, passage_tokens=10)
    assert [passage.text for passage in example.passages][1:] == ["short"]
    assert len(prompts.chunk_ids(example.passages[0].text)) == 10


def rows(limit: int) -> list[dict]:
    folder = os.environ.get("BLEND_RAG_DATA")
    if not folder:
        pytest.skip("BLEND_RAG_DATA is not set: it names a folder with musique_100.jsonl")
    lines = (Path(folder) / "musique_100.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


@pytest.mark.slow
def test_quality_rises_with_the_ratio_and_the_default_beats_its_baselines(
    engine: TransformersEngine, prompts: PromptBuilder
) -> None:
    """Averaged over documents, never per document: recomputing more must not make answers worse."""
    ladder = [RecomputePolicy(ratio=ratio) for ratio in (0.0, 0.15, 0.5, 1.0)]
    others = [REUSE, RecomputePolicy(selector="random"), RecomputePolicy(selector="k-deviation")]
    found: list[list[float]] = []
    for row in rows(10):
        passages = [prompts.tokenizer.decode(prompts.chunk_ids(text)[:256]) for text in row["passages"][:6]]
        for context in ("prefix", "alone"):
            engine.warm(prompts, passages, context=context)
        layout = prompts.build(passages=passages, question=row["question"])
        found.append([result.kl for result in kl_to_full(engine, layout, [*ladder, *others])])
    mean = [statistics.fmean(column) for column in zip(*found, strict=True)]
    nothing, default, half, everything, reuse, random, deviation = mean
    assert reuse > nothing > default > half > everything
    assert everything < 1e-4
    assert default < deviation < random
