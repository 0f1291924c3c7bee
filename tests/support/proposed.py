"""What a drafter proposes, for tests of untrained heads: nobody accepts what they say, so it has to be watched."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree


def proposed_by(runner: ModelRunner) -> list[tuple[int, ...]]:
    """Tokens of every tree that the drafter of ``runner`` proposes from now on, in the order of its nodes."""
    seen: list[tuple[int, ...]] = []
    propose = runner.drafter.propose

    def noted(seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        trees = propose(seqs, budgets)
        seen.extend(tuple(tree.token_ids) for tree in trees)
        return trees

    runner.drafter.propose = noted  # type: ignore[method-assign]
    return seen
