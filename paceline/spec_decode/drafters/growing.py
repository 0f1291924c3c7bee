"""What drafters that grow a tree level by level share: a sequence's unfinished tree, and how candidates join it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from paceline.errors import ConfigError
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.candidates import Candidates
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.expand import ROOT, Growth
from paceline.spec_decode.trees.static_trees import RankPath, checked_choices
from paceline.spec_decode.trees.tree import DraftTree, build_tree


@dataclass
class GrowingDraft:
    """One sequence's tree while it grows. Nodes are indices of ``growth.pool``, ROOT is the last committed token."""

    seq: Sequence
    budget: DraftBudget
    growth: Growth
    slots: list[int]  # free for node rows
    tails: dict[int, list[int]] = field(default_factory=lambda: {ROOT: []})  # expanded node -> slots of its path
    drawn_from: dict[int, torch.Tensor] = field(default_factory=dict)  # node -> q its children were drawn from

    @property
    def committed(self) -> int:
        """m, the root's position."""
        return len(self.seq.token_ids) - 1

    def child_position(self, node: int) -> int:
        """Where the candidates after ``node`` stand."""
        return self.committed + self.growth.pool.depth(node) + 1


D = TypeVar("D", bound=GrowingDraft)


def static_choices(static_tree: Seq[RankPath], width: int) -> tuple[RankPath, ...]:
    """The checked rank paths. Raises ConfigError when they need more than ``width`` candidates a node."""
    choices = checked_choices(static_tree)
    widest = max((max(choice) + 1 for choice in choices), default=1)
    if widest > width:
        raise ConfigError("tree_width", f"the static tree needs {widest} candidates a node, got {width}")
    return choices


def next_levels(drafts: Seq[D]) -> list[tuple[D, list[int]]]:
    """The nodes that every tree expands next, for one forward over all of them; trees that are done are left out."""
    return [(draft, level) for draft in drafts if (level := draft.growth.level())]


def hang(where: Seq[tuple[GrowingDraft, int]], found: Candidates, values: torch.Tensor) -> None:
    """Hang row r of ``found`` under the r-th node. values: log estimates of acceptance, [R, width]."""
    # What was drawn must not decide whether to go on, the law it was drawn from may (B7).
    sure = values[:, 0].exp() if found.full is None else found.full.amax(dim=1)
    rows = zip(where, found.ids.tolist(), values.tolist(), sure.tolist(), strict=True)
    for r, ((draft, node), ids, worth, confidence) in enumerate(rows):
        draft.growth.add(node, ids, worth, last=confidence < draft.budget.min_confidence)
        if found.full is not None and draft.seq.request.params.temperature > 0.0:
            draft.drawn_from[node] = found.full[r]


def grown_tree(draft: GrowingDraft, vocab_size: int, drafter: str) -> DraftTree:
    """The tree of the nodes kept, by the name of who made it."""
    pool, kept, budget = draft.growth.pool, draft.growth.kept(), draft.budget
    index = {ROOT: -1} | {node: i for i, node in enumerate(kept)}
    pairs = [(index[pool.parents[node]], pool.token_ids[node]) for node in kept]
    tree = build_tree(draft.seq.token_ids[-1], pairs, vocab_size, budget.max_nodes, budget.num_draft_tokens)
    inner = {pool.parents[node] for node in kept}
    drawn = {index[node] + 1: q for node, q in draft.drawn_from.items() if node in inner}
    return replace(tree, draft_probs=drawn or None, drafter=drafter)
