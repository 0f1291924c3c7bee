"""How long streams paused whose router, or whose Redis, was hurt."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

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


@contextmanager
def noting(under_way: Callable[[], Iterable[Served]]) -> Iterator[None]:
    """What the SDK says of routers that streams leave is among the tries of those streams."""
    handler = _Noting(under_way)
    logger = logging.getLogger("paceline.client")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Noting(logging.Handler):
    def __init__(self, under_way: Callable[[], Iterable[Served]]) -> None:
        super().__init__()
        self._under_way = under_way

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        for served in self._under_way():
            if said.startswith(f"{served.request_id}: "):
                served.tries.append((record.created, f"{served.at()}: {said}"))


def stories(done: Iterable[Served], slow: Sequence[Served], logs: Iterable[Path], most: int) -> str:
    """How the streams of either kind went that were without a chunk for longest when they moved, those that were
    lost and the ``slow`` ones: each with its client's tries, and what the routers' logs say of it."""
    streams = list(done)
    moved = sorted((served for served in streams if served.moves), key=lambda one: -_slowest(one))
    ways = {way: [one for one in moved if one.request_id.startswith(way)][:most] for way in ("grpc", "http")}
    lost = [served for served in streams if served.problems]
    chosen = {one.request_id: one for one in (*lost, *slow[:most], *ways["grpc"], *ways["http"])}.values()
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
    told = []
    for served in chosen:
        told.append(f"  {served.request_id} ({served.kind}), longest move {_slowest(served):.2f} s: {served.problems}")
        notes = [(at, said) for at, said in served.tries]
        notes += [
            (m.first, f"{m.source} > {m.target}, {m.first - m.last:.2f} s after the last chunk") for m in served.moves
        ]
        told += [f"    {clock(at)} {said}" for at, said in sorted(notes)]
        told += [f"      {line}" for line in lines if re.search(rf"{re.escape(served.request_id)}\b", line)][:40]
    return "\n".join(told)


def _slowest(served: Served) -> float:
    return max((move.first - move.last for move in served.moves), default=0.0)


def clock(at: float) -> str:
    """A Unix time, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
