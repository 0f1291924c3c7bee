"""Static trees as lists of rank paths (algorithms.md C3, C4): a shape decided before any draft; pure.

A choice is the ranks from the root to a node: ``(0,)`` is the best candidate of depth 1, ``(0, 1)`` the second best
after it. Choices are listed best first, so that cutting the list anywhere leaves a good smaller tree: parents come
before children and a rank before the next one. The second half matters beyond order: children that were drawn without
replacement prove nothing about the target's law unless the first draws are all kept (algorithms.md B6).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from functools import lru_cache

from paceline.errors import ConfigError

RankPath = tuple[int, ...]


def checked_choices(choices: Iterable[RankPath]) -> tuple[RankPath, ...]:
    """``choices`` as they are. Raises ConfigError("static_tree", ...) naming the first one that is out of place."""
    seen: set[RankPath] = {()}
    listed = tuple(tuple(choice) for choice in choices)
    for choice in listed:
        if not choice or any(rank < 0 for rank in choice):
            raise ConfigError("static_tree", f"{choice} is not a path of ranks 0, 1, ...")
        if choice in seen:
            raise ConfigError("static_tree", f"{choice} is listed twice")
        if choice[:-1] not in seen:
            raise ConfigError("static_tree", f"{choice} is listed before its parent {choice[:-1]}")
        if choice[-1] and (*choice[:-1], choice[-1] - 1) not in seen:
            raise ConfigError("static_tree", f"{choice} is listed before its better sibling")
        seen.add(choice)
    return listed


def fit(choices: Iterable[RankPath], depth: int, width: int, num_nodes: int) -> tuple[RankPath, ...]:
    """The part of ``choices`` within ``depth`` levels, ``width`` candidates a node and ``num_nodes`` nodes, root not
    counted. A checked list gives a checked list."""
    fitting = (choice for choice in choices if len(choice) <= depth and max(choice) < width)
    return tuple(choice for choice, _ in zip(fitting, range(num_nodes), strict=False))


def child_counts(choices: Iterable[RankPath]) -> dict[RankPath, int]:
    """Children of each node that has any, the root () included."""
    counts: dict[RankPath, int] = {}
    for choice in choices:
        counts[choice[:-1]] = counts.get(choice[:-1], 0) + 1
    return counts


def comb_choices(depth: int, width: int) -> tuple[RankPath, ...]:
    """``width`` candidates at each depth, the first of which carries the next depth; width 1 is a chain."""
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


@lru_cache(maxsize=256)
def fitted_counts(choices: tuple[RankPath, ...], depth: int, width: int, num_nodes: int) -> Mapping[RankPath, int]:
    """``child_counts`` of ``fit``; no ``choices`` means a comb. Read-only: rounds share it."""
    return child_counts(fit(choices or comb_choices(depth, width), depth, width, num_nodes))


def best_choices(rates: tuple[tuple[float, ...], ...], num_nodes: int) -> tuple[RankPath, ...]:
    """The ``num_nodes`` choices that are accepted most often, best first.

    rates[d][r]: how often the candidate of rank r at depth d+1 is the target's token, given that the path to it was
    accepted; not rising in r. A node is reached with the product along its path, and the tree accepts as many tokens
    as the sum over its nodes, so the best tree is the best nodes: of a node's successors in this order only its next
    sibling and its first child can be next.
    """
    chosen: list[RankPath] = []
    heap: list[tuple[float, int, RankPath, float]] = []  # (-value, depth, path, value of the parent)

    def push(path: RankPath, parent: float) -> None:
        level, rank = len(path) - 1, path[-1]
        if level < len(rates) and rank < len(rates[level]):
            heapq.heappush(heap, (-parent * rates[level][rank], level, path, parent))

    push((0,), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, _, path, parent = heapq.heappop(heap)
        chosen.append(path)
        push((*path[:-1], path[-1] + 1), parent)
        push((*path, 0), -negative)
    return tuple(chosen)


# Typical rates: an autoregressive head keeps its quality over the depths, independent heads lose it quickly. A tree
# built from a deployment's own measured rates is better; these are where to start. The first 7 nodes of each fill a
# verification of 8 rows, the first 15 one of 16.
_RANKS = (1.0, 0.21, 0.10, 0.055, 0.035, 0.025)  # each rank against the first
EAGLE_RATES = tuple(tuple(0.64 * 0.97**d * r for r in _RANKS) for d in range(8))
MEDUSA_RATES = tuple(tuple(first * r for r in _RANKS) for first in (0.56, 0.42, 0.34, 0.28))

EAGLE_TREE = checked_choices(best_choices(EAGLE_RATES, 24))
MEDUSA_TREE = checked_choices(best_choices(MEDUSA_RATES, 15))
MEDUSA_TREE_8 = MEDUSA_TREE[:7]
