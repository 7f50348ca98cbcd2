"""Prompts whose answer needs more than one chunk, made from a seed: what reuse without recomputation must get wrong.

Knows texts and examples; knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from blend_rag.evaluation.examples import Example
from blend_rag.layout import Passage

HOPS = (1, 2, 3, 4)
_NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "indigo", "jetty", "kelp", "lotus")
_PEOPLE = (
    ("Marta Lindqvist", "She", "her"),
    ("Oskar Brenner", "He", "his"),
    ("Paula Ferreira", "She", "her"),
    ("Henrik Dahl", "He", "his"),
    ("Ingrid Solberg", "She", "her"),
    ("Tomas Novak", "He", "his"),
)
_TRADES = ("a glassblower", "a clockmaker", "a bookbinder", "a cartographer", "a potter", "a luthier")
_TOWNS = ("Kiruna", "Aveiro", "Bergen", "Turku", "Gdansk", "Lucerne")
_TOOLS = ("tools", "sketches", "savings", "letters", "maps", "brushes")
_PLACES = (
    "in a blue chest under the stairs",
    "in a tin box behind the stove",
    "in a drawer of the old dresser",
    "in a leather bag by the door",
    "in a crate in the boathouse",
    "in a cupboard in the attic",
)
_FILLER = (
    "The notes of that day were copied by hand and checked twice before they were filed in the archive.",
    "Nothing else was written on the page, and the margin held only the date and a short signature.",
    "A second clerk read the line aloud while the first one compared it with the register on the desk.",
    "The register is kept in the reading room, where it can be seen on weekdays between nine and four.",
)


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """A kind of question, by name, and its examples; each has one answer."""

    name: str
    examples: tuple[Example, ...]


def probe_tasks(seed: int = 0, documents: int = 10) -> list[ProbeTask]:
    """Variable tracking over 1 to 4 shuffled chunks, and coreference over a chunk's border.

    Args:
        seed: the same seed gives the same prompts.
        documents: of each task.
    """
    tasks = [
        ProbeTask(f"variables-{hops}-hop", tuple(_many(documents, seed, partial(variables, hops)))) for hops in HOPS
    ]
    return [*tasks, ProbeTask("coreference", tuple(_many(documents, seed, coreference)))]


def variables(hops: int, dice: random.Random) -> Example:
    """A chain of assignments, one in each chunk, among others that do not matter; chunks are shuffled.

    With 1 hop the value is assigned to the asked variable itself, and one chunk answers: the control. Source of the
    task: RULER (arXiv 2404.06654).
    """
    names = dice.sample(_NAMES, 8)
    chain, others = names[:hops], names[hops:]
    value, *decoys = dice.sample(range(10_000, 100_000), 8 - hops + 1)
    lines = [f"The variable {chain[0]} has the value {value}."]
    lines += [f"The variable {name} has the same value as the variable {before}." for before, name in pairwise(chain)]
    lines += [f"The variable {name} has the value {decoy}." for name, decoy in zip(others, decoys, strict=True)]
    passages = [Passage(_padded(line, dice)) for line in lines]
    dice.shuffle(passages)
    return Example(f"What is the value of the variable {chain[-1]}?", tuple(passages), (str(value),))


def coreference(dice: random.Random) -> Example:
    """A person in one chunk, and in the next one a pronoun that only the chunk before resolves; pairs are shuffled."""
    people = dice.sample(_PEOPLE, 4)
    asked = people[0]
    towns, trades = dice.sample(_TOWNS, 4), dice.sample(_TRADES, 4)
    kept = dice.choice(_TOOLS)  # everybody's, so that only the chunk before tells whose
    places = dice.sample(_PLACES, 4)
    pairs = []
    for (name, pronoun, their), town, trade, place in zip(people, towns, trades, places, strict=True):
        first = f"{name} is {trade} from {town}. {dice.choice(_FILLER)}"
        second = f"{pronoun} keeps {their} {kept} {place}. {dice.choice(_FILLER)}"
        pairs.append((Passage(first), Passage(second)))
    answer = places[0]
    dice.shuffle(pairs)
    passages = tuple(passage for pair in pairs for passage in pair)
    return Example(f"Where does {asked[0]} keep {asked[2]} {kept}?", passages, (answer,))


def _padded(line: str, dice: random.Random) -> str:
    """An assignment somewhere among sentences that say nothing."""
    sentences = dice.sample(_FILLER, 3)
    sentences.insert(dice.randrange(4), line)
    return " ".join(sentences)


def _many(count: int, seed: int, make: Callable[[random.Random], Example]) -> Iterator[Example]:
    for number in range(count):
        yield make(random.Random(f"{seed}-{number}"))
