"""Draft lengths of a batch that give the most expected tokens per second (algorithms.md I3c; TurboSpec, 2406.14066).

All sequences of a round share one target step and, level by level, the draft steps. So lengths are chosen together:
depth by depth of the whole batch, rungs are added in order of expected tokens per row until tokens per second falls.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

EVERY_DEPTH = 8  # deeper than that, depths are tried in steps of a quarter


@dataclass(frozen=True)
class Ladder:
    """What one sequence may draft: depth d adds ``rows`` rows to the target step and ``gains[d-1]`` tokens."""

    gains: tuple[float, ...]  # expected, never rising
    rows: int = 1


def depth_limits(deepest: int) -> list[int]:
    """Batch depths to try besides 0: all small ones, then ever fewer, and the deepest."""
    limits = list(range(1, min(deepest, EVERY_DEPTH) + 1))
    while limits and limits[-1] < deepest:
        limits.append(min(deepest, limits[-1] + limits[-1] // 4))
    return limits


def allocate(
    ladders: Seq[Ladder], verify_s: Callable[[int], float], draft_s: Callable[[int], float]
) -> tuple[list[int], float]:
    """Depth of each sequence (0 is a plain step), and the expected tokens per second of the round.

    verify_s: seconds of the target step with so many rows past one per sequence, never falling with them. draft_s: of
    drafting so deep.
    """
    rungs = sorted(
        (-gain / ladder.rows, d, i) for i, ladder in enumerate(ladders) for d, gain in enumerate(ladder.gains, start=1)
    )
    seconds: dict[int, float] = {}

    def step(rows: int) -> float:
        if rows not in seconds:
            seconds[rows] = verify_s(rows)
        return seconds[rows]

    best, depths = len(ladders) / step(0), [0] * len(ladders)
    for limit in depth_limits(max((len(ladder.gains) for ladder in ladders), default=0)):
        allowed = [(d, i) for _, d, i in rungs if d <= limit]
        drafting, tokens, rows, taken = draft_s(limit), float(len(ladders)), 0, 0
        most = tokens + sum(ladders[i].gains[d - 1] for d, i in allowed)
        for count, (d, i) in enumerate(allowed, start=1):
            if most / (drafting + step(rows)) <= best:  # even the rest for nothing would not do
                break
            tokens += ladders[i].gains[d - 1]
            rows += ladders[i].rows
            rate = tokens / (drafting + step(rows))
            if rate > best:
                best, taken = rate, count
        if taken:
            depths = [0] * len(ladders)
            for d, i in allowed[:taken]:
                depths[i] = max(depths[i], d)
    return depths, best
