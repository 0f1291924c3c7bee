"""How long streams paused whose router, or whose Redis, was hurt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tests.chaos.faults import Fault
from tests.chaos.load import Served
from tests.chaos.report import AFTERMATH_S, percentile

RECOVERY_S = 5.0  # of nodes, once a fault of theirs is over


def resumes(fault: Fault, met: Iterable[Served], of_nodes: Sequence[Fault]) -> tuple[list[float], list[float]]:
    """Seconds between the last chunk from the router that ``fault`` took and the first from another, of each stream
    that was there and went on: where all nodes were well, and where not."""
    alone, also = list[float](), list[float]()
    for served in met:
        for move in served.moves:
            if move.source in fault.victims and fault.at <= move.first <= fault.until + AFTERMATH_S:
                began = max(move.last, fault.at)
                unwell = any(one.at < move.first and began < one.until + RECOVERY_S for one in of_nodes)
                (also if unwell else alone).append(move.first - began)
    return alone, also


def pauses(fault: Fault, all_of_them: Iterable[Served]) -> list[float]:
    """The longest pause that began in a fault, of each choice that was under way then."""
    found = []
    for served in all_of_them:
        for arrivals in served.arrivals.values():
            began = [(before, after) for before, after in pairwise(arrivals) if fault.at <= before <= fault.until]
            if began:
                found.append(max(after - before for before, after in began))
    return found


def table(rows: Iterable[tuple[str, Sequence[float]]]) -> str:
    """Percentiles of times, by name; times of one name are put together."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, times in rows:
        groups[name] += times
    lines = [f"{'':38} {'streams':>8} {'p50 s':>8} {'p99 s':>8} {'longest':>8}"]
    for name, times in sorted(groups.items()):
        if times:
            numbers = f"{percentile(times, 0.5):8.2f} {percentile(times, 0.99):8.2f} {max(times):8.2f}"
            lines.append(f"{name:38} {len(times):8} {numbers}")
    return "\n".join(lines)
