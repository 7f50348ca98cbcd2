"""Figures as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from blend_rag.errors import BlendRagError


def demo_table(questions: Sequence[dict[str, Any]]) -> Table:
    """One row a question, by number: tokens by fate, TTFT of full prefill and of blending, KL."""
    table = Table(title="Full prefill and blending of the same prompts")
    for name in ("#", "prompt", "reused", "recomputed", "computed", "full s", "blend s", "speed-up", "KL"):
        table.add_column(name, justify="right")
    for number, row in enumerate(questions, 1):
        table.add_row(
            str(number),
            *(str(row[f"{name}_tokens"]) for name in ("prompt", "reused", "recomputed", "computed")),
            f"{row['ttft_full_s']:.2f}",
            f"{row['ttft_blend_s']:.2f}",
            f"×{row['ttft_full_s'] / row['ttft_blend_s']:.1f}",
            f"{row['kl_to_full']:.3f}",
        )
    return table


def plot_ttft(questions: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of TTFT per question, full prefill beside blending, as a PNG file.

    Raises:
        BlendRagError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "plots need matplotlib: pip install 'blend-rag[demo]'"
        raise BlendRagError(msg) from error
    figure = Figure(figsize=(9, 1.2 + 0.6 * len(questions)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(questions))
    full = [row["ttft_full_s"] for row in questions]
    blend = [row["ttft_blend_s"] for row in questions]
    axes.barh([place - 0.2 for place in places], full, height=0.38, color="#9aa5b1", label="full prefill")
    axes.barh([place + 0.2 for place in places], blend, height=0.38, color="#2a7f62", label="blending")
    for place, (slow, fast) in enumerate(zip(full, blend, strict=True)):
        axes.annotate(f" ×{slow / fast:.1f}", (fast, place + 0.2), va="center", fontsize=9)
    axes.set_yticks(list(places), [row["question"] for row in questions])
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, seconds")
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
