"""Checks that prove blending works here: versions, self-test, reuse at another position, agreement."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.errors import BlendRagError
from blend_rag.layout import PromptBuilder

TESTED = {"torch": ("2.13",), "transformers": ("5.24",)}
_CHUNKS = (
    "The lighthouse on the northern cape was finished in 1871 and is painted in red and white bands.",
    "Every spring the harbour of the town is cleared of ice by two tugs called Anna and Berta.",
    "The ferry to the islands leaves at six in the morning and takes four hours in calm weather.",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `remedy` says what to do where it is not ok."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(model: str | None = None) -> list[Check]:
    """All checks; those that need a model are left out once it cannot be loaded."""
    return [*_versions(), *_engine_checks(model)]


def _versions() -> Iterator[Check]:
    yield Check("python", True, platform.python_version())
    for name, tested in TESTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(name, False, "not installed", f"pip install {name}")
            continue
        known = any(found.startswith(prefix) for prefix in tested)
        yield Check(name, True, found if known else f"{found}; tested with {', '.join(tested)}")


def _engine_checks(model: str | None) -> Iterator[Check]:
    from blend_rag.engines.transformers import TransformersEngine

    try:
        engine = TransformersEngine(model)
    except BlendRagError as error:
        yield Check("model", False, str(error), "see the message; `--model` takes a folder, a .gguf file or a hub id")
        return
    with engine:
        test = engine.self_test_report
        assert test is not None, "the self-test runs unless switched off"
        yield Check("model", True, f"{engine.model_name} on {engine.device}, up to {engine.max_model_len:,} tokens")
        yield Check(
            "self-test",
            test.passed,
            f"largest error {max(test.full_recompute_error, test.shift_error):.2g}, {test.tolerance:.2g} allowed",
        )
        yield from _reuse_checks(engine)


def _reuse_checks(engine: Any) -> Iterator[Check]:
    prompts = PromptBuilder(engine.tokenizer, system="Answer the question from the passages.")
    engine.warm(prompts, _CHUNKS)
    moved = prompts.build(passages=_CHUNKS[::-1], question="When was the lighthouse finished?")
    blended = engine.generate(moved, max_tokens=16)
    chunks = [segment for segment in blended.report.segments if segment.kind == "chunk"]
    last = chunks[-1]  # warmed first, now behind two others
    yield Check(
        "reuse at another position",
        last.reused > 0 and not blended.report.misses,
        f"{sum(chunk.reused + chunk.hot for chunk in chunks)} of {sum(chunk.tokens for chunk in chunks)} chunk tokens "
        f"reused, {blended.report.recomputed_tokens} recomputed",
        f"misses: {blended.report.misses or 'none'}; please report this with the output of `blend-rag doctor --json`",
    )
    full = engine.generate(moved, max_tokens=16, policy=FULL_PREFILL)
    recomputed = engine.generate(moved, max_tokens=16, policy=RecomputePolicy(ratio=1.0))
    yield Check(
        "agreement with full prefill",
        full.token_ids == recomputed.token_ids,
        f"at ratio 1 all {len(full.token_ids)} greedy tokens agree"
        if full.token_ids == recomputed.token_ids
        else f"at ratio 1 the answer is {recomputed.text!r}, full prefill says {full.text!r}",
        "use another model or dtype, and report this with the output of `blend-rag doctor --json`",
    )
