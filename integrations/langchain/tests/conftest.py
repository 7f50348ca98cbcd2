"""One embedded engine on the real SmolLM2 for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from langchain_core.documents import Document

from blend_rag import MemoryStore, RecomputePolicy, load_engine
from blend_rag.engines.transformers import TransformersEngine
from langchain_blend_rag import ChatBlend

settings.register_profile("shared machines", deadline=None)  # a slow moment is no failure
settings.load_profile("shared machines")

FACTS = {
    "capital": "The capital of Freedonia is Fredville, a small town known for its blue cheese and its old mill.",
    "king": "King Rufus the Third has ruled Freedonia since 1933. He rides a red bicycle to the palace every day.",
    "trains": "Trains in Freedonia are painted green and run at night only, because the days are far too hot.",
    "food": "The national dish of Freedonia is a soup of beets and plums, served cold on the first day of spring.",
}
QUESTION = "What is the capital of Freedonia?"


@pytest.fixture(scope="session")
def engine() -> Iterator[TransformersEngine]:
    with load_engine() as engine:
        yield engine


@pytest.fixture
def fresh(engine: TransformersEngine) -> TransformersEngine:
    """The session's model with an empty store and nothing hot."""
    return TransformersEngine.from_loaded(
        engine.decoder.model, engine.tokenizer, store=MemoryStore(), self_test=False, policy=RecomputePolicy()
    )


@pytest.fixture
def make_chat(fresh: TransformersEngine) -> Callable[..., ChatBlend]:
    return lambda **options: ChatBlend(engine=fresh, **{"max_tokens": 16, **options})


@pytest.fixture
def documents() -> list[Document]:
    return [Document(page_content=text, id=name, metadata={"source": f"{name}.md"}) for name, text in FACTS.items()]
