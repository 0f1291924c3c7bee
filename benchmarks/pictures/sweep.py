"""Where speculation stops paying: speed over no drafter by batch size, from a kept run of ``paceline bench sweep``."""

from __future__ import annotations

from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import SWEEP
from benchmarks.speculation.drafter_specs import BASELINE
from benchmarks.speculation.sweep import SweepReport

COLOURS = (style.DECODE, style.PREFILL, style.DRAFT, style.ROUTER, style.TARGET_KV, style.OTHER)


def draw(report: SweepReport | None = None) -> Any:
    """The figure; of the kept run when none is given."""
    report = report or SweepReport.read(SWEEP)
    figure = style.new_figure(11, 4.6)
    axes = figure.subplots()
    drafters = [d for d in dict.fromkeys(p.drafter for p in report.points) if d != BASELINE]
    for drafter, colour in zip(drafters, COLOURS, strict=False):
        points = [p for p in report.points if p.drafter == drafter]
        look = {"marker": "o", "linewidth": 2.0, "color": colour, "label": drafter}
        axes.plot([p.batch for p in points], [p.speedup for p in points], **look)
    batches = sorted({p.batch for p in report.points})
    axes.axhline(1.0, color=style.INK, linewidth=1.0, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="sequences in a batch", ylabel="speed-up over no drafter")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=11)
    s = report.settings
    title = f"{s.model}, {s.dtype}, {s.threads} {s.device.upper()} core, temperature {s.temperature:g}"
    axes.set_title(title, loc="left", fontsize=13)
    return figure
