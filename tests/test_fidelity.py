"""The measure of fidelity, and that quality rises with the ratio on real questions."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest

from blend_rag import FULL_PREFILL, PromptBuilder, RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PromptTooLongError
from blend_rag.evaluation.fidelity import kl_to_full

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
