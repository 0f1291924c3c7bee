"""The hand-off's timeline, from the kept trace of one request: what computes, what crosses, and when.

The first panel has the whole hand-off, the second the moment of the first token, where prefill and decode meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import HANDOFF_TRACE

LANES = ("router", "prefill node", "link: sent", "link: received", "decode node")
BAR = 0.62  # height of a span, of the unit between two lanes
BEFORE_MS, AFTER_MS = 45.0, 110.0  # of the second panel, around the first token
LABEL = 0.1  # of a panel's width: narrower spans bear no text
LEAST_MS = 0.0025  # of a panel's width: thinner spans are drawn this wide, or nobody would see them


@dataclass(frozen=True)
class Span:
    """One event on the lane of its track; times are milliseconds since the request came. A moment has no length."""

    lane: int
    name: str
    start_ms: float
    length_ms: float
    details: dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """A trace, read."""

    spans: tuple[Span, ...]
    other: dict[str, Any]

    def named(self, *names: str) -> list[Span]:
        """The spans of these names, by start."""
        return [span for span in self.spans if span.name in names]

    def moment(self, name: str) -> float:
        """When the first event of this name began, in milliseconds."""
        return self.named(name)[0].start_ms


TRACK_LANES = {"request": 0, "choice": 0, "prefill": 1, "send": 2, "receive": 3, "decode": 4}


def read(path: Path = HANDOFF_TRACE) -> Timeline:
    """The events of a file that ``paceline trace`` wrote. KeyError for a track that has no lane."""
    content = json.loads(path.read_text(encoding="utf-8"))
    events = content["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "thread_name"}
    spans = [
        Span(TRACK_LANES[tracks[e["tid"]]], e["name"], e["ts"] / 1e3, e.get("dur", 0) / 1e3, e["args"])
        for e in events
        if e["ph"] != "M"
    ]
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_ms)), content["otherData"])


def draw(timeline: Timeline | None = None) -> Any:
    """The figure; of the kept trace when none is given."""
    timeline = timeline or read()
    figure = style.new_figure(11, 7.4)
    whole, near = figure.subplots(2, 1)
    first = timeline.moment("first token")
    _panel(whole, timeline, 0.0, first + AFTER_MS)
    _panel(near, timeline, first - BEFORE_MS, first + AFTER_MS)
    tokens = f"{timeline.named('planned')[0].details['prompt_tokens']:.0f}"
    other = timeline.other
    whole.set_title(f"One hand-off of {tokens} tokens: {other['model']}, drafter {other['drafter']}", loc="left")
    near.set_title("The same, around the first token", loc="left")
    _legend(figure)
    return figure


def _panel(axes: Any, timeline: Timeline, start: float, end: float) -> None:
    for span in _bars(timeline):
        width = max(span.length_ms, LEAST_MS * (end - start))
        if span.start_ms + width > start and span.start_ms < end:
            edge = 0.8 if span.name in ("chunk", "round") else 0.0  # parts those that touch
            look = {"color": _colour(span), "edgecolor": style.CARD, "linewidth": edge}
            axes.barh(span.lane, width, BAR, left=span.start_ms, **look)
    first = timeline.moment("first token")
    axes.axvline(first, color=style.INK, linewidth=1.0, linestyle=":")
    axes.text(first - 0.006 * (end - start), 0, "first token", ha="right", va="center", fontsize=10.5)
    labels = [(span, f"chunk {i}") for i, span in enumerate(timeline.named("chunk"), 1)]
    labels += [(span, _yield(span)) for span in timeline.named("round")]
    for span, label in labels:
        if span.start_ms >= start and span.length_ms > LABEL * (end - start) and _middle(span) < end:
            axes.text(_middle(span), span.lane, label, ha="center", va="center", color=style.CARD, fontsize=10)
    axes.set(xlim=(start, end), ylim=(len(LANES) - 0.5, -0.5), xlabel="milliseconds since the request came")
    axes.set_yticks(range(len(LANES)), LANES)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _yield(span: Span) -> str:
    """What a round committed, the bonus token counted."""
    tokens = int(span.details["accepted"]) + 1
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _middle(span: Span) -> float:
    return span.start_ms + span.length_ms / 2


def _bars(timeline: Timeline) -> Iterable[Span]:
    """What is drawn: what computes, what crosses, and what the client was sent."""
    names = ("chunk", "chunk sent", "chunk received", "state sent", "state received", "round", "tokens")
    return [*timeline.named(*names), *(span for span in timeline.named("first token") if span.lane == 0)]


def _colour(span: Span) -> str:
    if span.name == "chunk":
        return style.PREFILL
    if span.name == "round":
        return style.DECODE
    if span.lane == 0:
        return style.ROUTER
    return style.TARGET_KV if span.details.get("byte_class") == "target_kv" else style.DRAFT


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    entries = {
        "prefill computes a chunk": style.PREFILL,
        "target KV, a group of layers": style.TARGET_KV,
        "draft KV and state": style.DRAFT,
        "a round: draft, verify, commit": style.DECODE,
        "tokens for the client": style.ROUTER,
    }
    handles = [Patch(color=colour, label=label) for label, colour in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
