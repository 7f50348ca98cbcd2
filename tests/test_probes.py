"""Made-up tasks: the answer follows from the chunks, from as many as the task says, and from the seed alone."""

from __future__ import annotations

import random
import re

import pytest

from blend_rag.evaluation.probes import HOPS, coreference, probe_tasks, variables

VALUE = re.compile(r"The variable (\w+) has the value (\d+)\.")
LINK = re.compile(r"The variable (\w+) has the same value as the variable (\w+)\.")


@pytest.mark.parametrize("hops", HOPS)
def test_variables_lead_to_the_answer_over_as_many_chunks(hops: int) -> None:
    orders = set()
    for seed in range(20):
        example = variables(hops, random.Random(seed))
        texts = [passage.text for passage in example.passages]
        values = {name: value for text in texts for name, value in VALUE.findall(text)}
        links = {name: before for text in texts for name, before in LINK.findall(text)}
        name = re.findall(r"variable (\w+)\?", example.question)[0]
        used = 1
        while name in links:
            name, used = links[name], used + 1
        assert (values[name],) == example.answers
        assert used == hops
        assert all(len(VALUE.findall(text)) + len(LINK.findall(text)) == 1 for text in texts), "one line in each chunk"
        assert sum(example.answers[0] in text for text in texts) == 1
        assert len(set(values.values())) == len(values)
        orders.add(next(place for place, text in enumerate(texts) if example.answers[0] in text))
    assert len(orders) > 3, "chunks are shuffled"


def test_coreference_needs_the_chunk_before() -> None:
    for seed in range(20):
        example = coreference(random.Random(seed))
        texts = [passage.text for passage in example.passages]
        [place] = [number for number, text in enumerate(texts) if example.answers[0] in text]
        asked = re.findall(r"Where does (.+) keep", example.question)[0]
        assert asked not in texts[place]
        assert asked in texts[place - 1]
        assert place % 2 == 1


def test_the_seed_alone_decides() -> None:
    tasks = probe_tasks(3, documents=4)
    assert tasks == probe_tasks(3, documents=4)
    assert tasks != probe_tasks(4, documents=4)
    assert [task.name for task in tasks] == [*(f"variables-{hops}-hop" for hops in HOPS), "coreference"]
    for task in tasks:
        assert len({example.question + str(example.passages) for example in task.examples}) == 4
    assert probe_tasks(3, documents=2)[0].examples == tasks[0].examples[:2], "more documents keep the first ones"
