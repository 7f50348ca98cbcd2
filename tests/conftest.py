"""Fixtures shared by all tests: the packaged model, engines on it, and bare prompts on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from blend_rag import PromptBuilder, load_engine
from blend_rag.engines.loading import resolve_model
from blend_rag.engines.transformers import TransformersEngine

settings.register_profile("shared machines", deadline=None)  # a slow moment is no failure
settings.load_profile("shared machines")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the packaged SmolLM2-135M-Instruct, converted on first use."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[TransformersEngine]:
    """One engine on SmolLM2 for all tests that do not change its settings; its store fills up over the session."""
    with load_engine(smollm2) as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts(engine: TransformersEngine) -> PromptBuilder:
    return PromptBuilder(engine.tokenizer, system="Answer the question from the passages.")
