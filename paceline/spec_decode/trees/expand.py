"""How a draft tree grows, level by level (algorithms.md D3, D4); pure, no tensors.

Whoever drafts adds candidates under the root, then asks for the next ``level`` of nodes to expand, runs one draft
forward over them, adds what came out, and so on until a level is empty. ``kept`` is the tree.

* ``StaticGrowth``: rank paths decided beforehand (``static_trees``);
* ``DynamicGrowth``: EAGLE-2 (arXiv 2406.16858): the ``width`` best nodes of a level are expanded; or, with a
  threshold, every node whose path is probable enough. Either way the best of everything drafted are kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.spec_decode.trees.static_trees import RankPath

ROOT = -1


@dataclass
class DraftPool:
    """Everything drafted, in order of generation; parents before children. Index -1 is the root."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 below the root
    log_values: list[float] = field(default_factory=list)  # sum of the log estimates along the path, <= 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def depth(self, node: int) -> int:
        """0 for the root."""
        return 0 if node == ROOT else self.depths[node]

    def add(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> range:
        """Children of ``parent``, best first; their indices. The first impossible one (-inf, NaN) ends the list.

        A log estimate above 0 (a softmax that rounded to more than 1) counts as 0: a child worth more than its parent
        could be kept without it.
        """
        first = len(self)
        above = 0.0 if parent == ROOT else self.log_values[parent]
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            if not log_prob > -math.inf:
                break
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.depths.append(self.depth(parent) + 1)
            self.log_values.append(above + min(log_prob, 0.0))
        return range(first, len(self))

    def order(self, node: int) -> tuple[float, int, int]:
        """Sorts the better node first. With estimates of exactly 1 a child ties with its parent: the shallower goes
        first, which is what keeps any number of best nodes connected (algorithms.md D4)."""
        return (-self.log_values[node], self.depths[node], node)

    def best(self, count: int) -> list[int]:
        """The ``count`` best nodes, in order of generation; a node's parent is always among them."""
        return sorted(sorted(range(len(self)), key=self.order)[: max(count, 0)])


class Growth(ABC):
    """Which candidates become nodes, which nodes are expanded, which are kept."""

    def __init__(self) -> None:
        self.pool = DraftPool()
        self._fresh: list[int] = []  # nodes of the newest level that may be expanded

    @abstractmethod
    def add(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float], *, last: bool = False) -> None:
        """Candidates after ``parent`` (ROOT at first), best first. ``last``: they are kept but not expanded."""

    @abstractmethod
    def level(self) -> list[int]:
        """The nodes to expand next, all of one depth; each is to be given candidates by ``add``. Empty: done."""

    @abstractmethod
    def kept(self) -> list[int]:
        """Nodes of the tree as indices of the pool, parents before children."""


class StaticGrowth(Growth):
    """The rank paths whose numbers of children are ``counts`` (``static_trees.child_counts``)."""

    def __init__(self, counts: Mapping[RankPath, int]) -> None:
        super().__init__()
        self.counts = counts
        self._paths: list[RankPath] = []

    def add(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float], *, last: bool = False) -> None:
        """See Growth."""
        above = () if parent == ROOT else self._paths[parent]
        count = self.counts.get(above, 0)
        for rank, node in enumerate(self.pool.add(parent, token_ids[:count], log_probs[:count])):
            path = (*above, rank)
            self._paths.append(path)
            if path in self.counts and not last:
                self._fresh.append(node)

    def level(self) -> list[int]:
        """See Growth."""
        level, self._fresh = self._fresh, []
        return level

    def kept(self) -> list[int]:
        """See Growth."""
        return list(range(len(self.pool)))


class DynamicGrowth(Growth):
    """A tree of at most ``depth`` levels and ``keep`` nodes, grown where the drafter is confident.

    ``width``: candidates of an expanded node. Expanded are the ``width`` best of a level (EAGLE-2), or with
    ``expand_above`` all whose value, a probability, reaches it, ``keep`` nodes over all levels at most. A node that
    ``keep`` others precede already is not worth a draft forward: what comes below it cannot be kept either.
    """

    def __init__(self, depth: int, width: int, keep: int, expand_above: float | None = None) -> None:
        super().__init__()
        self.depth, self.width, self.num_kept = depth, width, keep
        self._log_above = None if expand_above is None else math.log(expand_above)
        self._expanded = 0

    def add(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float], *, last: bool = False) -> None:
        """See Growth."""
        nodes = self.pool.add(parent, token_ids[: self.width], log_probs[: self.width])
        if not last and self.pool.depth(parent) + 1 < self.depth:
            self._fresh.extend(nodes)

    def level(self) -> list[int]:
        """See Growth."""
        fresh, self._fresh = sorted(self._fresh, key=self.pool.order), []
        if not fresh:
            return []
        alive = set(self.pool.best(self.num_kept))
        if self._log_above is None:
            level = [node for node in fresh[: self.width] if node in alive]
        else:
            room = self.num_kept - self._expanded
            level = [n for n in fresh if n in alive and self.pool.log_values[n] >= self._log_above][:room]
        self._expanded += len(level)
        return level

    def kept(self) -> list[int]:
        """See Growth."""
        return self.pool.best(self.num_kept)
