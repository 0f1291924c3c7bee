"""What a drafter proposes, for tests of untrained heads: nobody accepts what they say, so it has to be watched."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree


def proposed_by(runner: ModelRunner) -> list[tuple[str, tuple[int, ...]]]:
    """Every tree that the drafter of ``runner`` proposes from now on, of several drafters the one with heads: for which
    request, and its tokens in the order of its nodes."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    drafter = runner.drafter.primary
    propose = drafter.propose

    def noted(seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        trees = propose(seqs, budgets)
        named = zip(seqs, trees, strict=True)
        seen.extend((seq.request.request_id, tuple(tree.token_ids)) for seq, tree in named)
        return trees

    drafter.propose = noted  # type: ignore[method-assign]
    return seen
