"""Time to first token of full prefill, reuse alone and blending, interleaved in one process.

    python benchmarks/ttft.py --tokens 1024,2048,4096,8000 --ratio 0.15 --selector first-k,k-deviation,query-guided

Prompts are 256-token windows of the Python language reference behind a system prompt, a question last.
"""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from pathlib import Path
from pydoc_data import topics
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from blend_rag import PromptBuilder, PromptLayout, RecomputePolicy, SegmentKind, load_engine
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.evaluation.ttft import blended_first_token, ideal_speedup, plain_prefill, time_interleaved

CHUNK_TOKENS = 256
QUESTION = "Which statement binds the result of an expression to a name?"
Row = dict[str, str | float | int | None]


def chunk_texts(prompts: PromptBuilder, count: int) -> list[str]:
    """`count` different texts of exactly `CHUNK_TOKENS` tokens from the language reference."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = prompts.tokenizer.literal(text)
    found: list[str] = []
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = prompts.tokenizer.decode(ids[start : start + CHUNK_TOKENS])
        if len(prompts.chunk_ids(chunk)) == CHUNK_TOKENS and chunk not in found:
            found.append(chunk)
        if len(found) == count:
            return found
    raise typer.BadParameter(f"the reference holds only {len(found)} chunks, {count} are needed")


def prompt_of(prompts: PromptBuilder, texts: list[str], tokens: int, seed: int) -> PromptLayout:
    """A prompt of `tokens` tokens, give or take a merge, over shuffled chunks, the last one shorter."""
    spare = tokens - len(prompts.build(question=QUESTION))
    count, rest = divmod(spare, CHUNK_TOKENS + 1)
    chosen = list(texts[:count])
    random.Random(seed).shuffle(chosen)
    if rest > 1:
        chosen.append(prompts.tokenizer.decode(prompts.chunk_ids(texts[count])[: rest - 1]))
    return prompts.build(passages=chosen, question=QUESTION)


def measure(
    engine: TransformersEngine, layout: PromptLayout, selectors: list[str], ratios: list[float], repeats: int
) -> list[Row]:
    """One row per arm: reuse alone and every selector at every ratio beside full prefill."""
    policies = {("reuse", "none", 0.0): RecomputePolicy(ratio=0.0)}
    for selector in selectors:
        for ratio in ratios:
            policies["blend", selector, ratio] = RecomputePolicy(ratio=ratio, selector=selector)
    arms = {"full": lambda: plain_prefill(engine, layout)}
    arms |= {str(arm): blended_first_token(engine, layout, policy) for arm, policy in policies.items()}
    timings = time_interleaved(arms, repeats)
    full = timings["full"]
    rows: list[Row] = [_row(layout, "full", None, None, full, 1.0, 1.0)]
    for arm, policy in policies.items():
        timing = timings[str(arm)]
        ideal = ideal_speedup(engine, engine.plan(layout, policy))
        name, selector, ratio = arm
        rows.append(_row(layout, name, selector, ratio, timing, full.median_s / timing.median_s, ideal))
    return rows


def _row(layout: PromptLayout, arm: str, selector: str | None, ratio: float | None, timing, speedup, ideal) -> Row:
    return {
        "tokens": len(layout),
        "arm": arm,
        "selector": selector,
        "ratio": ratio,
        "ttft_s": timing.median_s,
        "ttft_min_s": timing.min_s,
        "ttft_max_s": timing.max_s,
        "speedup": speedup,
        "ideal_speedup": ideal,
    }


def _numbers(text: str, kind: type) -> list:
    return [kind(part) for part in text.split(",") if part]


def main(
    tokens: Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")] = "1024,2048,4096,8000",
    ratio: Annotated[str, typer.Option(help="Recompute ratios, comma-separated.")] = "0.15",
    selector: Annotated[str, typer.Option(help="Selectors, comma-separated.")] = "first-k,k-deviation,query-guided",
    repeats: Annotated[int, typer.Option(help="Counted runs of every arm.")] = 5,
    model: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or hub id; packaged SmolLM2 if left out.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    """Measure and print a table."""
    lengths = _numbers(tokens, int)
    # hot KV off: repeated runs of one prompt would otherwise find its beginning on the device
    with load_engine(model, hot_bytes=0, show_progress=True) as engine:
        prompts = PromptBuilder(engine.tokenizer, system="Answer the question from the passages.")
        texts = chunk_texts(prompts, max(lengths) // CHUNK_TOKENS + 1)
        rows: list[Row] = []
        for length in tqdm(lengths, desc="prompt lengths"):
            layout = prompt_of(prompts, texts, length, seed=length)
            engine.warm(prompts, [chunk.text for chunk in layout.of_kind(SegmentKind.CHUNK)])
            rows += measure(engine, layout, _numbers(selector, str), _numbers(ratio, float), repeats)
        result = {
            "model": engine.model_name,
            "device": engine.device_description,
            "versions": {name: version(name) for name in ("blend-rag", "torch", "transformers")},
            "rows": rows,
        }
    table = Table("tokens", "arm", "selector", "ratio", "TTFT s (min to max)", "speed-up", "ideal")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            str(row["arm"]),
            str(row["selector"] or ""),
            str("" if row["ratio"] is None else row["ratio"]),
            f"{row['ttft_s']:.3f} ({row['ttft_min_s']:.3f} to {row['ttft_max_s']:.3f})",
            f"{row['speedup']:.2f}",
            f"{row['ideal_speedup']:.2f}",
        )
    Console().print(table)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
