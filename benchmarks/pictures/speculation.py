"""What each drafter gives: tokens per round, and speed over no drafter, from the kept run of ``paceline bench
speculation``."""

from __future__ import annotations

from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import SPECULATION
from benchmarks.speculation.bench import Report
from benchmarks.speculation.drafter_specs import BASELINE
from benchmarks.speculation.stats import ALL, Summary


def draw(report: Report | None = None) -> Any:
    """The figure; of the kept run when none is given."""
    report = report or Report.read(SPECULATION)
    rows = _rows(report)
    figure = style.new_figure(11, 1.9 + 0.36 * len(rows))
    lengths, gains = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    bars = lengths.barh(places, [row.acceptance_length for row in rows], 0.66, color=style.DRAFT)
    lengths.bar_label(bars, fmt="%.2f", padding=3, fontsize=10.5)
    colours = [style.DECODE if row.speedup >= 1.0 else style.OTHER for row in rows]
    below = [max(0.0, row.speedup - row.speedup_low) for row in rows]
    above = [max(0.0, row.speedup_high - row.speedup) for row in rows]
    gains.barh(places, [row.speedup for row in rows], 0.66, color=colours, xerr=[below, above], ecolor=style.INK)
    for place, row in zip(places, rows, strict=True):
        gains.text(max(row.speedup, row.speedup_high) + 0.03, place, f"{row.speedup:.2f}", va="center", fontsize=10.5)
    lengths.set_yticks(places, [_label(row) for row in rows])
    lengths.invert_yaxis()
    lengths.set_xlabel("tokens per round, bonus token included")
    gains.set_xlabel("speed-up over no drafter (lines: 95 %)")
    for axes in (lengths, gains):
        axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=":")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.12)
    s = report.settings
    prompts = rows[0].prompts
    figure.suptitle(
        f"{s.model}, {s.dtype}, {s.threads} {s.device.upper()} core, batch 1, temperature {s.temperature:g}: "
        f"{prompts} questions of {len(report.summaries) // (len(rows) + 1) - 1} kinds",
        fontsize=13,
    )
    return figure


def _rows(report: Report) -> list[Summary]:
    """Each drafter over all prompts, the fastest first."""
    rows = [s for s in report.summaries if s.category == ALL and s.drafter != BASELINE]
    return sorted(rows, key=lambda row: -row.speedup)


def _label(row: Summary) -> str:
    """``eagle3:tree=dynamic,width=4,k=6`` as words."""
    name, _, options = row.drafter.partition(":")
    return f"{name}  {options.replace('tree=', '').replace(',', ', ').replace('=', ' ')}".strip()
