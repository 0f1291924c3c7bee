"""The path of a request: who asks whom for what, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.pictures import style

WIDTH, BOTTOM, TOP = 110.0, 10.0, 74.0  # of the drawing, in its own units


@dataclass(frozen=True)
class Box:
    """A process: its lower left corner, size, name and what it does."""

    x: float
    y: float
    width: float
    height: float
    name: str
    does: str
    colour: str


CLIENT = Box(2, 54, 19, 14, "client", "SDK, OpenAI client,\ncurl", style.OTHER)
ROUTER = Box(39, 54, 22, 14, "router", "tokenizes, chooses nodes,\nreplays what fails", style.ROUTER)
REDIS = Box(39, 32, 22, 11, "Redis", "leases, journal", style.OTHER)
PREFILL = Box(80, 57, 28, 14, "prefill node", "computes the prompt,\nchunk by chunk", style.PREFILL)
DECODE = Box(80, 32, 28, 14, "decode node", "drafts and verifies,\nround by round", style.DECODE)

Point = tuple[float, float]
# (from, to, number, where the number stands: 0 to 1 of the way, colour, line width)
ARROWS: tuple[tuple[Point, Point, str, float, str, float], ...] = (
    ((21, 64), (39, 64), "1", 0.5, style.INK, 1.6),
    ((61, 58), (80, 42), "2", 0.62, style.DECODE, 1.6),
    ((61, 65), (80, 67), "3", 0.35, style.PREFILL, 1.6),
    ((90, 57), (90, 46), "4", 0.5, style.TARGET_KV, 5.0),
    ((80, 62), (61, 62), "5", 0.35, style.PREFILL, 1.6),
    ((100, 57), (100, 46), "6", 0.5, style.DRAFT, 2.6),
    ((80, 36), (57, 54), "7", 0.35, style.DECODE, 1.6),
    ((39, 58), (21, 58), "8", 0.5, style.INK, 1.6),
)
LEASES: tuple[tuple[Point, Point], ...] = (((46, 54), (46, 43)), ((80, 34), (61, 34)))
STEPS = (
    "1  A request comes by gRPC or HTTP.",
    "2  Decode: pages are reserved; a ticket comes back.",
    "3  Prefill: the prompt, with the ticket.",
    "4  KV crosses in groups of layers (gloo or NCCL)\n    while the next ones are computed.",
    "5  The first token goes out at once.",
    "6  State: draft KV and candidates. It ends the\n    hand-off; the prefill node frees its pages.",
    "7  Each round: draft, verify in one forward, commit.",
    "8  The client reads one stream of tokens.",
)


def draw() -> Any:
    """The figure."""
    from matplotlib.patches import FancyArrowPatch

    figure = style.new_figure(11, 6.4, layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(BOTTOM, TOP))
    axes.axis("off")
    for start, end in LEASES:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-", linestyle=":", color=style.QUIET, linewidth=1.8))
    for box in (CLIENT, ROUTER, REDIS, PREFILL, DECODE):
        _box(axes, box)
    for start, end, number, at, colour, width in ARROWS:
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 16 + width, "shrinkA": 0, "shrinkB": 0}
        arrow = FancyArrowPatch(start, end, color=colour, linewidth=width, **look)
        axes.add_patch(arrow)
        _number(axes, (start[0] + at * (end[0] - start[0]), start[1] + at * (end[1] - start[1])), number, colour)
    axes.text(70.5, 31.6, "leases of both nodes", ha="center", va="center", fontsize=11, color=style.QUIET)
    for column, steps in enumerate((STEPS[:4], STEPS[4:])):
        axes.text(3 + 54 * column, 25, "\n".join(steps), va="top", linespacing=1.55, color=style.INK, fontsize=12)
    return figure


def _box(axes: Any, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=1.6")
    shape.set(facecolor=box.colour + "1f", edgecolor=box.colour, linewidth=2.0)
    axes.add_patch(shape)
    middle = box.x + box.width / 2
    axes.text(middle, box.y + box.height - 2.8, box.name, ha="center", va="center", fontsize=14, weight="bold")
    axes.text(middle, box.y + (box.height - 4.6) / 2, box.does, ha="center", va="center", fontsize=11, color=style.INK)


def _number(axes: Any, at: Point, number: str, colour: str) -> None:
    look = {"boxstyle": "circle,pad=0.28", "facecolor": style.CARD, "edgecolor": colour, "linewidth": 1.8}
    axes.text(*at, number, ha="center", va="center", fontsize=12, weight="bold", color=style.INK, bbox=look)
