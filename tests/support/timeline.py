"""What must hold of every trace file."""

from __future__ import annotations

from typing import Any


def check_timeline(made: dict[str, Any]) -> dict[str, list[str]]:
    """Every row is named, its events are in order of time, its spans nest or are apart. The rows' event names."""
    labels = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"] for e in made["traceEvents"] if e["name"] == "process_name"}
    rows: dict[str, list[str]] = {}
    open_until: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for event in made["traceEvents"]:
        if event["ph"] == "M":
            continue
        tid, start = event["tid"], event["ts"]
        assert event["pid"] in processes
        assert start >= last.get(tid, 0)
        last[tid] = start
        rows.setdefault(labels[tid], []).append(event["name"])
        if event["ph"] != "X":
            continue
        ends = open_until.setdefault(tid, [])
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or start + event["dur"] <= ends[-1], f"{event['name']} overlaps in {labels[tid]}"
        ends.append(start + event["dur"])
    return rows
