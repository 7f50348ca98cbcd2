"""The arithmetic of ideal speed-ups, interleaving, and the memory a long blend takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blend_rag import FULL_PREFILL, PromptBuilder, RecomputePolicy
from blend_rag.blend.passes import blend
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.evaluation.ttft import ideal_speedup, plain_prefill, time_interleaved

PASSAGES = ["alpha beta gamma delta " * 30, "one two three four " * 30, "red green blue white " * 30]


def test_arms_run_in_turn_and_warm_up_does_not_count() -> None:
    calls: list[str] = []
    timings = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert all(0 <= t.min_s <= t.median_s <= t.max_s for t in timings.values())


def test_plain_prefill_is_the_baseline_that_full_prefill_equals(
    engine: TransformersEngine, prompts: PromptBuilder
) -> None:
    layout = prompts.build(passages=PASSAGES, question="Which colours?")
    plan = engine.plan(layout, FULL_PREFILL)
    assert len(plan.computed) == len(layout)
    blended = engine.decoder.logits(blend(engine.decoder, [plan])[0].last_hidden)
    torch.testing.assert_close(blended, plain_prefill(engine, layout), atol=1e-3, rtol=1e-4)


def test_ideal_speedup_falls_with_the_ratio_and_charges_for_the_score_pass(
    engine: TransformersEngine, prompts: PromptBuilder
) -> None:
    engine.warm(prompts, PASSAGES)
    layout = prompts.build(passages=PASSAGES, question="Which colours?")

    def ideal(**policy: object) -> float:
        return ideal_speedup(engine, engine.plan(layout, RecomputePolicy(**policy)))  # type: ignore[arg-type]

    assert ideal_speedup(engine, engine.plan(layout, FULL_PREFILL)) == pytest.approx(1.0)
    assert ideal(ratio=0.0) > ideal(ratio=0.15) > ideal(ratio=0.5) > 1.0
    assert ideal(selector="first-k") > ideal(selector="k-deviation")
    assert ideal(selector="first-k") > ideal(selector="query-guided")
    assert ideal(selector="oracle") < 1.0


MEMORY = """
import random, sys
from blend_rag import PromptBuilder, load_engine

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

engine = load_engine(sys.argv[1])
prompts = PromptBuilder(engine.tokenizer, system="Answer from the passages.")
rng = random.Random(0)
words = "river stone cloud paper light garden window silver morning letter".split()
engine.generate(prompts.build(question="Warm up."), max_tokens=1)
loaded = status("VmRSS")
passages = []
while sum(len(prompts.chunk_ids(text)) for text in passages) < 7700:
    passages.append(" ".join(rng.choice(words) for _ in range(220)))
engine.warm(prompts, passages)
layout = prompts.build(passages=passages, question="Which words are there?")
open("/proc/self/clear_refs", "w").write("5")  # restart the high-water mark
engine.generate(layout, max_tokens=1)
shape = engine.decoder.shape
kv = len(layout) * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
print(len(layout), (status("VmHWM") - loaded) / kv)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from Linux's /proc")
def test_blending_8000_tokens_takes_at_most_three_times_their_kv(smollm2: Path) -> None:
    """Stored KV included: growth over the loaded model, in multiples of the prompt's float32 KV."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(smollm2)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(done[0]) > 7700
    assert float(done[1]) <= 3.0, done
