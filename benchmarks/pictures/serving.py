"""Apart or in one node: latencies and goodput under load, from a kept run of ``paceline bench serving``."""

from __future__ import annotations

from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import SERVING
from benchmarks.serving import plot
from benchmarks.serving.report import ServingReport


def draw(report: ServingReport | None = None) -> Any:
    """The figure; of the kept run when none is given."""
    figure = style.new_figure(*plot.SIZE_IN)
    plot.draw(report or ServingReport.read(SERVING), figure)
    return figure
