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
    figure = _figure((9, 1.2 + 0.6 * len(questions)))
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


def fidelity_table(arms: Sequence[dict[str, Any]], documents: int) -> Table:
    """One row for each arm of a fidelity run."""
    table = Table(title=f"Distance to full prefill over {documents} documents")
    names = ("selector", "ratio", "chunks computed", "KL", "95 %", "top-1", "gap closed", "95 %", "TTFT")
    for name in names:
        table.add_column(name, justify="left" if name in ("selector", "chunks computed") else "right")
    for arm in arms:
        speedup = arm["ttft_speedup"]
        table.add_row(
            _arm_name(arm),
            f"{arm['ratio']:g}",
            "behind the prefix" if arm["context"] == "prefix" else "alone",
            f"{arm['kl32']:.3f}",
            "{:.3f} to {:.3f}".format(*arm["kl32_ci"]),
            f"{arm['top1']:.3f}",
            f"{arm['gap_closed']:.2f}",
            "{:.2f} to {:.2f}".format(*arm["gap_closed_ci"]),
            "" if speedup is None else f"×{speedup:.1f}",
        )
    return table


def probe_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each arm of each probe."""
    table = Table(title="Questions whose answer needs more than one chunk: distance to full prefill at the answer")
    for name in ("task", "selector", "ratio", "chunks computed", "KL", "gap closed", "95 %"):
        table.add_column(name, justify="left" if name in ("task", "selector", "chunks computed") else "right")
    for row in rows:
        table.add_row(
            row["task"],
            _arm_name(row),
            f"{row['ratio']:g}",
            "behind the prefix" if row["context"] == "prefix" else "alone",
            f"{row['kl_answer']:.3f}",
            f"{row['gap_closed']:.2f}",
            "{:.2f} to {:.2f}".format(*row["gap_closed_ci"]),
        )
    return table


def plot_fidelity(arms: Sequence[dict[str, Any]], path: Path) -> None:
    """KL and TTFT speed-up against the ratio, a line for each rule over chunks behind the prefix, as a PNG file.

    Raises:
        BlendRagError: matplotlib is not installed.
    """
    figure = _figure((8, 7))
    quality, speed = figure.subplots(2, 1, sharex=True)
    shown = [arm for arm in arms if arm["context"] == "prefix" and arm["correct_positions"] and not arm["schedule"]]
    reuse = [arm for arm in shown if arm["selector"] == "reuse"]
    rules = {arm["selector"]: None for arm in shown if arm["selector"] not in ("full", "reuse")}
    for rule in rules:
        line = sorted([*reuse, *(arm for arm in shown if arm["selector"] == rule)], key=lambda arm: arm["ratio"])
        ratios, kl = [arm["ratio"] for arm in line], [arm["kl32"] for arm in line]
        low, high = zip(*(arm["kl32_ci"] for arm in line), strict=True)
        errors = [
            [value - end for value, end in zip(kl, low, strict=True)],
            [end - value for value, end in zip(kl, high, strict=True)],
        ]
        quality.errorbar(ratios, kl, yerr=errors, marker="o", capsize=3, label=rule)
        timed = [arm for arm in line if arm["ttft_speedup"] is not None]
        speed.plot([arm["ratio"] for arm in timed], [arm["ttft_speedup"] for arm in timed], marker="o", label=rule)
    quality.set_ylabel("mean KL to full prefill, nats")
    quality.set_ylim(bottom=0)
    speed.set_ylabel("TTFT of full prefill / TTFT")
    speed.axhline(1.0, color="#9aa5b1", linewidth=0.8)
    speed.set_xlabel("recompute ratio r")
    quality.legend(frameon=False)
    for axes in (quality, speed):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _arm_name(arm: dict[str, Any]) -> str:
    notes = []
    if arm["schedule"]:
        notes.append("narrowed")
    if not arm["correct_positions"]:
        notes.append("positions not corrected")
    return f"{arm['selector']} ({', '.join(notes)})" if notes else str(arm["selector"])


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "plots need matplotlib: pip install 'blend-rag[demo]'"
        raise BlendRagError(msg) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
