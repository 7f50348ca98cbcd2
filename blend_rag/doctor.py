"""Checks that prove blending works here: versions, self-test, reuse at another position, agreement."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.errors import BlendRagError
from blend_rag.layout import PromptBuilder, PromptLayout

TESTED = {"torch": ("2.13",), "transformers": ("5.24",)}
_CHUNKS = (
    "The lighthouse on the northern cape was finished in 1871 and is painted in red and white bands.",
    "Every spring the harbour of the town is cleared of ice by two tugs called Anna and Berta.",
    "The ferry to the islands leaves at six in the morning and takes four hours in calm weather.",
)
_QUESTIONS = (
    "When was the lighthouse finished?",
    "What are the two tugs called?",
    "When does the ferry leave?",
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


def diagnose(model: str | None = None, engine: str = "transformers") -> list[Check]:
    """All checks; those that need a model are left out once it cannot be loaded.

    Args:
        model: as `load_engine` takes it.
        engine: "transformers", "vllm", or the URL of a server.
    """
    if engine == "transformers":
        return [*_versions(), *_embedded_checks(model)]
    return [*_versions(("transformers",)), *_vllm_checks(model, engine)]


def _versions(names: Collection[str] = tuple(TESTED)) -> Iterator[Check]:
    yield Check("python", True, platform.python_version())
    for name in names:
        tested = TESTED[name]
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(name, False, "not installed", f"pip install {name}")
            continue
        known = any(found.startswith(prefix) for prefix in tested)
        yield Check(name, True, found if known else f"{found}; tested with {', '.join(tested)}")


def _embedded_checks(model: str | None) -> Iterator[Check]:
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
        yield from _reuse_checks(engine, exact=True)


def _vllm_checks(model: str | None, name: str) -> Iterator[Check]:
    """Of vLLM with the connector, in this process or in a server."""
    import blend_rag
    from blend_rag.engines.vllm_setup import TESTED_VLLM

    try:
        engine: Any = blend_rag.load_engine(model, engine=name)
    except BlendRagError as error:
        yield Check("engine", False, str(error), "see the message")
        return
    with engine:
        about = engine.about
        known = about["vllm"].split("+")[0] in TESTED_VLLM
        tested = "" if known else f"; tested with {', '.join(TESTED_VLLM)}"
        yield Check("engine", True, f"{engine.model_name} on {name}, up to {engine.max_model_len:,} tokens")
        yield Check("vllm", True, f"{about['vllm']}{tested}")
        yield Check(
            "connector",
            about["blend_rag"] == blend_rag.__version__,
            f"blend-rag {about['blend_rag']} there, {blend_rag.__version__} here",
            "install the same release on both sides",
        )
        yield from _reuse_checks(engine, exact=about["dtype"] == "float32")


def _reuse_checks(engine: Any, exact: bool) -> Iterator[Check]:
    prompts = PromptBuilder(engine.tokenizer, system="Answer the question from the passages.")
    warmed = engine.warm(prompts, _CHUNKS)
    yield Check(
        "warming",
        not warmed.refused,
        f"{warmed.computed} chunks computed, {warmed.present} were there",
        f"{' '.join(warmed.refused[:1])}; look at the store",
    )
    moved = [prompts.build(passages=_CHUNKS[::-1], question=question) for question in _QUESTIONS]
    blended = engine.generate(moved[0], max_tokens=16)
    chunks = [segment for segment in blended.report.segments if segment.kind == "chunk"]
    last = chunks[-1]  # warmed first, now behind two others
    yield Check(
        "reuse at another position",
        last.reused > 0 and not blended.report.misses,
        f"{sum(chunk.reused + chunk.hot for chunk in chunks)} of {sum(chunk.tokens for chunk in chunks)} chunk tokens "
        f"reused, {blended.report.recomputed_tokens} recomputed",
        f"misses: {blended.report.misses or 'none'}; please report this with the output of `blend-rag doctor --json`",
    )
    yield _agreement(engine, moved, exact)


def _agreement(engine: Any, prompts: list[PromptLayout], exact: bool) -> Check:
    """Ratio 1 against full prefill: the same greedy tokens, but where rounding decides between equals.

    In 16 bits two tokens can have the same probability, and answers part there: what must agree then is every first
    token and half of all.
    """
    full = engine.generate(prompts, max_tokens=16, policy=FULL_PREFILL)
    recomputed = engine.generate(prompts, max_tokens=16, policy=RecomputePolicy(ratio=1.0))
    agreeing = [_common(left.token_ids, right.token_ids) for left, right in zip(full, recomputed, strict=True)]
    lengths = [max(len(left.token_ids), len(right.token_ids)) for left, right in zip(full, recomputed, strict=True)]
    wanted = sum(lengths) if exact else sum(lengths) / 2
    ok = sum(agreeing) >= wanted and all(agreeing)
    worst = min(range(len(prompts)), key=lambda number: agreeing[number] / max(lengths[number], 1))
    detail = f"at ratio 1 {sum(agreeing)} of {sum(lengths)} greedy tokens of {len(prompts)} answers agree"
    if sum(agreeing) < sum(lengths):
        detail += f"; one says {recomputed[worst].text!r}, full prefill {full[worst].text!r}"
    return Check(
        "agreement with full prefill",
        ok,
        detail,
        "use another model or dtype, and report this with the output of `blend-rag doctor --json`",
    )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
