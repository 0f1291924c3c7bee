"""Simulated rounds for the choosers of draft lengths and drafters: an acceptance process and an explicit cost model."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import cast

from paceline.kvcache.table import PageTable
from paceline.request import SpeculationParams
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.length.cost import CostTable, Grid, MeasureGrid
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.tiny_model import tiny_request


def bare_sequence(index: int = 0, prompt: Seq[int] = (5, 9, 3), drafter: str | None = None) -> Sequence:
    """A sequence ready to decode, with no pages behind it."""
    request = replace(
        tiny_request(list(prompt), index=index, max_tokens=10**6), speculation=SpeculationParams(drafter=drafter)
    )
    seq = Sequence.start(request, cast("PageTable", None))
    seq.token_ids.append(7)
    return seq


def chain_tree(seq: Sequence, depth: int, drafter: str = "") -> DraftTree:
    """A chain of ``depth`` draft tokens."""
    nodes = range(depth + 1)
    return DraftTree((seq.token_ids[-1],) + (1,) * depth, tuple(i - 1 for i in nodes), tuple(nodes), drafter=drafter)


def comb_tree(seq: Sequence, depth: int, width: int, drafter: str = "") -> DraftTree:
    """``width`` candidates per depth, the first of each carrying the next."""
    ids, parents, depths, spine = [seq.token_ids[-1]], [-1], [0], 0
    for d in range(1, depth + 1):
        first = len(ids)
        ids += list(range(width))
        parents += [spine] * width
        depths += [d] * width
        spine = first
    return DraftTree(tuple(ids), tuple(parents), tuple(depths), drafter=drafter)


def budget_tree(seq: Sequence, budget: DraftBudget, drafter: str = "") -> DraftTree:
    """The largest tree that ``budget`` allows."""
    depth = budget.num_draft_tokens
    return comb_tree(seq, depth, (budget.max_nodes - 1) // depth if depth else 1, drafter)


@dataclass
class Costs:
    """What a round takes: ``step(batch, rows)`` seconds, and ``draft`` seconds per level of the deepest tree."""

    step: Callable[[int, int], float]
    draft: dict[str, float] = field(default_factory=dict)

    def table(self, grid: MeasureGrid = MeasureGrid(limit_s=1e9)) -> CostTable:
        """A table measured on this model, without noise."""
        measured = CostTable.measure(self.step, grid)
        cells = {name: [[s * d for d in (0, 1, 2, 4, 8, 16)] for _ in grid.batches] for name, s in self.draft.items()}
        drafts = {name: Grid(grid.batches, (0, 1, 2, 4, 8, 16), rows) for name, rows in cells.items()}
        return CostTable(measured.target, drafts)

    def draft_s(self, trees: Seq[DraftTree]) -> float:
        """Seconds of drafting: each drafter steps all of its trees together."""
        deepest: dict[str, int] = {}
        for tree in trees:
            deepest[tree.drafter] = max(deepest.get(tree.drafter, 0), *tree.depths)
        return sum(self.draft.get(name, 0.0) * depth for name, depth in deepest.items())

    def verify_s(self, trees: Seq[DraftTree]) -> float:
        """Seconds of the target step."""
        return self.step(len(trees), sum(tree.num_nodes for tree in trees))


def accept(rng: random.Random, tree: DraftTree, rate: float | Seq[float]) -> int:
    """Draft tokens accepted, each with ``rate`` (one for all depths, or one per depth) given the one before."""
    for d in range(max(tree.depths)):
        if rng.random() >= (rate if isinstance(rate, float) else rate[d]):
            return d
    return max(tree.depths)


def commit(seq: Sequence, tree: DraftTree, accepted: int, tokens: Seq[int] | None = None) -> None:
    """Append what a round committed and count it, as the runner does."""
    seq.token_ids.extend(tokens if tokens is not None else [7] * (accepted + 1))
    seq.stats.add(tree.num_draft_tokens, max(tree.depths), accepted)
