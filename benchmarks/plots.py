"""Plots of the speculation benchmarks, as PNG. matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speculation.bench import Report
from benchmarks.speculation.drafter_specs import BASELINE
from benchmarks.speculation.sweep import SweepReport
from paceline.errors import ConfigError

GROUP_WIDTH = 0.8  # of the unit between two categories
NUM_COLOURS = 10  # of matplotlib's cycle; bars past them are hatched
HATCHES = ("", "//", "xx")
LEGEND_CHARACTERS, KEY_CHARACTERS = 200, 8  # of small print in a figure's width; that a key and its gap take of them


def load_matplotlib() -> Any:
    """``matplotlib.figure``. Raises ConfigError when matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("plot", "needs matplotlib: pip install matplotlib") from None


def _save(figure: Any, path: Path) -> None:
    # A Figure without pyplot draws on Agg's canvas: no display, no global state.
    figure.savefig(path, format="png", dpi=120)


def plot_speculation(report: Report, path: Path) -> None:
    """Acceptance length and speed-up by category, a bar per drafter. Raises ConfigError."""
    figure = load_matplotlib().Figure(figsize=(12, 7), layout="constrained")
    lengths, gains = figure.subplots(2, 1, sharex=True)
    categories = list(dict.fromkeys(s.category for s in report.summaries))
    drafters = [d for d in dict.fromkeys(s.drafter for s in report.summaries) if d != BASELINE]
    width = GROUP_WIDTH / max(1, len(drafters))
    for i, drafter in enumerate(drafters):
        rows = [s for s in report.summaries if s.drafter == drafter]
        places = [x - GROUP_WIDTH / 2 + (i + 0.5) * width for x in range(len(rows))]
        look = {"color": f"C{i % NUM_COLOURS}", "hatch": HATCHES[i // NUM_COLOURS % len(HATCHES)]}
        lengths.bar(places, [s.acceptance_length for s in rows], width, label=drafter, **look)
        below = [max(0.0, s.speedup - s.speedup_low) for s in rows]
        above = [max(0.0, s.speedup_high - s.speedup) for s in rows]
        gains.bar(places, [s.speedup for s in rows], width, yerr=[below, above], capsize=2, **look)
    lengths.set_ylabel("acceptance length\n(tokens per round, bonus counted)")
    gains.set_ylabel("speed-up over none (95 %)")
    for axes in (lengths, gains):
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.3)
    gains.set_xticks(range(len(categories)), categories)
    if drafters:
        figure.legend(loc="outside lower center", ncols=_columns(drafters), fontsize="small")
    s = report.settings
    figure.suptitle(f"{s.model}, {s.dtype}, {s.device}, {s.threads} threads, T={s.temperature:g}, batch 1")
    _save(figure, path)


def _columns(labels: Sequence[str]) -> int:
    """Columns of a legend that is as wide as the figure."""
    return max(1, min(4, len(labels), LEGEND_CHARACTERS // (max(map(len, labels), default=0) + KEY_CHARACTERS)))


def plot_sweep(report: SweepReport, path: Path) -> None:
    """Tokens/s and speed-up over the batch size, the crossovers marked. Raises ConfigError."""
    figure = load_matplotlib().Figure(figsize=(12, 5), layout="constrained")
    rates, gains = figure.subplots(1, 2)
    batches = sorted({p.batch for p in report.points})
    for drafter in dict.fromkeys(p.drafter for p in report.points):
        points = [p for p in report.points if p.drafter == drafter]
        style = {"marker": "o", "linestyle": "--" if points[0].to_best is not None else "-"}
        rates.plot([p.batch for p in points], [p.tokens_per_s for p in points], label=drafter, **style)
        (line,) = gains.plot([p.batch for p in points], [p.speedup for p in points], label=drafter, **style)
        crossing = report.crossovers.get(drafter)
        if crossing is not None:
            gains.axvline(crossing, color=line.get_color(), linestyle=":")
            gains.annotate(f"{crossing:.1f}", (crossing, 1.0), color=line.get_color(), fontsize="small")
    gains.axhline(1.0, color="black", linewidth=0.8)
    for axes, label in ((rates, "tokens/s"), (gains, "speed-up over none; dotted: crossover")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.set_xlabel("batch (dashed: adaptive)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    rates.legend(fontsize="small")
    s = report.settings
    figure.suptitle(f"{s.model}, {s.dtype}, {s.device}, {s.threads} threads, T={s.temperature:g}")
    _save(figure, path)
