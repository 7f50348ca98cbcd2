"""One embedded engine on the real SmolLM2 for all tests, and an index over real passages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pydoc_data import topics

import pytest
from llama_index.core import Document

from blend_rag import MemoryStore, RecomputePolicy, load_engine
from blend_rag.engines.transformers import TransformersEngine
from llama_index.llms.blend_rag import BlendLLM

FACTS = {
    "capital": "The capital of Freedonia is Fredville, a small town known for its blue cheese and its old mill.",
    "king": "King Rufus the Third has ruled Freedonia since 1933. He rides a red bicycle to the palace every day.",
    "trains": "Trains in Freedonia are painted green and run at night only, because the days are far too hot.",
    "food": "The national dish of Freedonia is a soup of beets and plums, served cold on the first day of spring.",
}
QUESTION = "What is the capital of Freedonia?"
SYSTEM = "Answer from the passages."


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
def make_llm(fresh: TransformersEngine) -> Callable[..., BlendLLM]:
    return lambda **options: BlendLLM(**{"engine": fresh, "max_tokens": 16, **options})


@pytest.fixture
def documents() -> list[Document]:
    return [Document(text=text, id_=name, metadata={"file": f"{name}.md"}) for name, text in FACTS.items()]


def real_passages(count: int = 32) -> list[Document]:
    """Beginnings of topics of Python's language reference."""
    names = sorted(name for name, text in topics.topics.items() if len(text) > 600)[:count]
    return [Document(text=topics.topics[name][:600] + "\n", id_=name, metadata={"topic": name}) for name in names]
