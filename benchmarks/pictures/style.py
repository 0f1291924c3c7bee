"""What all pictures share: a white card that reads on light and dark pages, colours, and SVG files that do not change
unless their content does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plots import load_matplotlib

SETTINGS: dict[str, Any] = {  # of matplotlib, while a picture is drawn and written
    "svg.hashsalt": "paceline",  # ids of the file's parts
    "svg.fonttype": "path",  # a reader's fonts change nothing
    "font.family": "DejaVu Sans",  # matplotlib brings it
    "font.size": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
MARGIN_IN = 0.18  # around each plot
INK, QUIET, CARD, EDGE = "#1f2933", "#5b6773", "#ffffff", "#c5ccd3"
ROUTER, PREFILL, DECODE, DRAFT, OTHER = "#7a5195", "#c8553d", "#2f6f9f", "#d9a21b", "#6b7a89"
TARGET_KV = "#3f9b6d"


def new_figure(width_in: float, height_in: float, layout: str = "constrained") -> Any:
    """An empty ``matplotlib.figure.Figure`` of this size, its background a white card with an edge. Raises ConfigError
    without matplotlib."""
    figure = load_matplotlib().Figure(figsize=(width_in, height_in), layout=layout, facecolor=CARD)
    figure.patch.set(edgecolor=EDGE, linewidth=2.0)
    if layout == "constrained":
        figure.get_layout_engine().set(w_pad=MARGIN_IN, h_pad=MARGIN_IN)
    return figure


def drawing() -> Any:
    """A context in which ``SETTINGS`` hold."""
    load_matplotlib()
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def save(figure: Any, path: Path) -> None:
    """Write the figure as SVG, without the date and the version that matplotlib would note."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, edgecolor=EDGE)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
