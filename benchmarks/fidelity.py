"""KL to full prefill for every selector, with random choice and reuse alone as baselines.

    python benchmarks/fidelity.py --limit 12 --json build/bench/fidelity.json

Prompts are questions over retrieved passages of the Python language reference, or rows of a JSON-lines file with
`question` and `passages` (passages are cut to 256 tokens, 6 of them are used).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from blend_rag import Passage, PromptBuilder, RecomputePolicy, load_engine
from blend_rag.corpus import reference_passages
from blend_rag.demo import QUESTIONS as DEMO_QUESTIONS
from blend_rag.evaluation.fidelity import kl_to_full
from blend_rag.retrieval import Retriever

QUESTIONS = (
    *DEMO_QUESTIONS,
    "How are chained comparisons evaluated?",
    "What is the result of the modulo operator with a negative operand?",
    "How does a for loop know that its iterator is exhausted?",
    "What are the rules for mangling private names in a class?",
    "Which objects can be used as keys of a dictionary?",
)
REUSE = RecomputePolicy(ratio=0.0, context="alone")
POLICIES = (
    RecomputePolicy(ratio=0.0, context="alone", correct_positions=False),
    REUSE,
    RecomputePolicy(ratio=0.0),
    *(
        RecomputePolicy(selector=name)
        for name in ("random", "k-deviation", "v-deviation", "first-k", "query-guided", "oracle")
    ),
    RecomputePolicy(selector="k-deviation", check_layer=3, schedule=((1, 0.3),)),
    *(RecomputePolicy(selector=name, context="alone") for name in ("k-deviation", "query-guided")),
    RecomputePolicy(ratio=0.3),
    RecomputePolicy(ratio=1.0),
)


def reference_prompts(prompts: PromptBuilder, limit: int) -> Iterator[tuple[str, list[Passage]]]:
    """Built-in questions with the six passages nearest in meaning."""
    passages = reference_passages(prompts.tokenizer.count)
    retriever = Retriever(passages, show_progress=True)
    for question in QUESTIONS[:limit]:
        yield question, [hit.passage for hit in retriever.search(question, 6)]


def file_prompts(prompts: PromptBuilder, path: Path, limit: int) -> Iterator[tuple[str, list[Passage]]]:
    """Rows of a JSON-lines file."""
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        cut = [prompts.tokenizer.decode(prompts.chunk_ids(text)[:256]) for text in row["passages"][:6]]
        yield row["question"], [Passage(text) for text in cut]


def main(
    data: Annotated[Path | None, typer.Option(help="JSON-lines file; the language reference if left out.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts.")] = 12,
    tokens: Annotated[int, typer.Option(help="Forced tokens per prompt.")] = 32,
    model: Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    """Measure and print a table."""
    with load_engine(model, show_progress=True) as engine:
        prompts = PromptBuilder(engine.tokenizer, system="Answer the question from the passages.")
        source = file_prompts(prompts, data, limit) if data else reference_prompts(prompts, limit)
        found: list[list] = [[] for _ in POLICIES]
        for question, passages in tqdm(list(source), desc="prompts"):
            for context in ("prefix", "alone"):
                engine.warm(prompts, passages, context=context)
            layout = prompts.build(passages=passages, question=question)
            for results, result in zip(found, kl_to_full(engine, layout, POLICIES, tokens), strict=True):
                results.append(result)
        name = engine.model_name
    mean = {policy: statistics.fmean(r.kl for r in results) for policy, results in zip(POLICIES, found, strict=True)}
    rows = [
        {
            "selector": policy.selector if policy.ratio else None,
            "ratio": policy.ratio,
            "context": policy.context,
            "correct_positions": policy.correct_positions,
            "schedule": policy.schedule,
            "kl": mean[policy],
            "top1": statistics.fmean(r.top1 for r in results),
            "gap_closed": 1 - mean[policy] / mean[REUSE],
        }
        for policy, results in zip(POLICIES, found, strict=True)
    ]
    table = Table("selector", "ratio", "chunks computed", "KL", "top-1", "gap closed", title=f"{len(found[0])} prompts")
    for row in rows:
        selector = row["selector"] or ("reuse" if row["correct_positions"] else "reuse, positions not corrected")
        figures = (f"{row['kl']:.4f}", f"{row['top1']:.3f}", f"{row['gap_closed']:.2f}")
        narrowed = " (narrowed)" if row["schedule"] else ""
        table.add_row(f"{selector}{narrowed}", f"{row['ratio']:g}", row["context"], *figures)
    Console().print(table)
    if json_file:
        versions = {package: version(package) for package in ("blend-rag", "torch", "transformers")}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        report = {"model": name, "prompts": len(found[0]), "tokens": tokens, "versions": versions, "rows": rows}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
