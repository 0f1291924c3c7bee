"""Prompt lookup (Saxena 2023; algorithms.md C2): what followed the last tokens when they stood here before.

The longest match goes first (up to MAX_MATCH tokens, down to one); of equally long ones the continuation that came
most often, then the most recent. The draft is as long as the match makes likely (copying.py), at most the budget's K.
With a tree width above 1 the other continuations, those of shorter matches too, become branches. The sequence's own
tokens, prompt and committed output, are all there is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.drafters.copying import Growth, OwnText, check_vocab, grow, own_occurrences
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree


class NgramDrafter(Drafter):
    """Prompt lookup over prompt and committed output. Raises ValueError for a vocabulary that copying cannot hold."""

    name = "ngram"

    def __init__(self, vocab_size: int) -> None:
        check_vocab(vocab_size)
        self.vocab_size = vocab_size
        self.hits = 0  # rounds with at least one draft token
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows; tokens are read when proposing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        pairs: list[tuple[int, int]] = []
        if budget.num_draft_tokens:
            pairs = grow(own_occurrences(OwnText.of(seq)), Growth.within(budget))
            self.hits += bool(pairs)
            self.misses += not pairs
        return build_tree(seq.token_ids[-1], pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)
