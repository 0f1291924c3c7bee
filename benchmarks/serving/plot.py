"""The plot of a serving benchmark: who waits how long, and how much of it is good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import load_matplotlib
from benchmarks.serving.measures import Record
from benchmarks.serving.report import ServingReport

STYLES = ("-", "--", ":", "-.")


SIZE_IN = (14.0, 4.8)


def plot(report: ServingReport, path: Path) -> None:
    """Draw into a file: PNG or SVG, by its name. Raises ConfigError when matplotlib is not installed."""
    figure = load_matplotlib().Figure(figsize=SIZE_IN, layout="constrained")
    draw(report, figure)
    figure.savefig(path, dpi=120)


def draw(report: ServingReport, figure: Any) -> None:
    """TTFT and TPOT of all requests at the middle rate as shares, and goodput over the rates (bars for a single one).

    figure: an empty ``matplotlib.figure.Figure``.
    """
    first, each, good = figure.subplots(1, 3)
    rates, names = report.rates(), report.names()
    rate = rates[len(rates) // 2]
    for i, name in enumerate(names):
        look = {"color": f"C{i % 10}", "linestyle": STYLES[i % len(STYLES)], "label": name}
        records = [r for run in report.records(name, rate) for r in run]
        _shares(first, [r.ttft_ms for r in records if not r.error and r.ttft_ms is not None], records, look)
        _shares(each, [r.tpot_ms for r in records if not r.error and r.tpot_ms is not None], records, look)
        shares = [100 * report.summary(name, at).goodput for at in rates]
        if len(rates) > 1:
            good.plot(rates, shares, marker="o", **look)
        else:
            good.bar([i], shares, color=look["color"])
    objective = report.settings.objective
    for axes, limit, what in (
        (first, objective.ttft_ms, "time to first token"),
        (each, objective.tpot_ms, "time per token"),
    ):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel(f"{what}, ms, at {rate:g} requests/s (dotted: objective)")
        axes.set_ylabel("% of requests at or below")
    good.set_ylabel("% of requests within the objective")
    good.set_ylim(0, 104)
    if len(rates) > 1:
        good.set_xlabel("requests/s")
    else:
        good.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize="small")
    for axes in (first, each, good):
        axes.grid(alpha=0.3)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(names)), fontsize="small")
    figure.suptitle(f"{report.settings.model}, {report.settings.cores} cores, {report.settings.arrivals} arrivals")


def _shares(axes: Any, values: Sequence[float], of: Sequence[Record], look: dict[str, str]) -> None:
    ordered = sorted(values)
    shares = [100 * (i + 1) / len(of) for i in range(len(ordered))]
    axes.step([*ordered[:1], *ordered], [0.0, *shares] if ordered else [], where="post", **look)
    axes.set_ylim(0, 104)
