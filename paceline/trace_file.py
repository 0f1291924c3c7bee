"""A trace as a timeline: the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process row per node, one thread row per track, sequence and attempt. Times are microseconds from the first event.
"""

from __future__ import annotations

from typing import Any

from paceline.results import RequestTrace, TraceEvent

_Row = tuple[str, str, int]  # sequence, track, attempt


def chrome_trace(trace: RequestTrace) -> dict[str, Any]:
    """The file's content. Spans are complete events ("X"), moments are instants ("i"); rows are named by metadata
    events ("M"). What is missing stands under ``otherData``."""
    origin = min((event.start_s for event in trace.events), default=0.0)
    nodes = {name: pid for pid, name in enumerate(dict.fromkeys(event.node for event in trace.events), 1)}
    rows: dict[tuple[str, _Row], int] = {}
    events = []
    for event in sorted(trace.events, key=lambda event: (event.start_s, -(event.end_s or event.start_s))):
        row = event.node, (event.sequence, event.track, event.attempt)
        events.append(_event(event, origin, nodes[event.node], rows.setdefault(row, len(rows) + 1)))
    named = [_name("process_name", pid, 0, node) for node, pid in nodes.items()]
    named += [_name("thread_name", nodes[node], tid, _label(row)) for (node, row), tid in rows.items()]
    other = {
        "request_id": trace.request_id,
        "started_unix_s": origin,
        "silent_nodes": list(trace.silent),
        "dropped_events": trace.dropped,
    }
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": other}


def _event(event: TraceEvent, origin: float, pid: int, tid: int) -> dict[str, Any]:
    start = _micros(event.start_s - origin)
    made: dict[str, Any] = {"name": event.name, "pid": pid, "tid": tid, "ts": start, "args": dict(event.attributes)}
    if event.end_s is None:
        return made | {"ph": "i", "s": "t"}
    # Ends are rounded as starts are: spans that touch must not come to overlap.
    return made | {"ph": "X", "dur": max(0, _micros(event.end_s - origin) - start)}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _label(row: _Row) -> str:
    sequence, track, attempt = row
    return f"{track} {sequence}" + (f" (attempt {attempt})" if attempt > 1 else "")
