"""Suffix decoding (Oliaro et al., arXiv 2411.04975; algorithms.md C2b): the likeliest continuation of the longest
stretches of recent text that stood before, in the request itself or in the tenant's finished outputs.

What differs from the paper: no suffix trees are kept. The occurrences of the last tokens are searched for in both
texts and ranked together (copying.py), which counts what the trees' nodes would count, MAX_OCCURRENCES of each text
at most. Path probabilities are count ratios times the confidence in a match of that length, so a match of L tokens
drafts some 4 L where the paper bounds the draft by floor(factor * L + offset), and the longest match leads where
the paper takes the best score.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.drafters.copying import (
    MAX_MATCH,
    MIN_PROBABILITY,
    Growth,
    Occurrence,
    OwnText,
    check_vocab,
    find,
    grow,
    longest_first,
    own_occurrences,
)
from paceline.spec_decode.drafters.tenants import TenantOutputs
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

OTHERS_DISCOUNT = 0.5  # a match in another text counts as that much shorter: the request's own win ties


class SuffixDrafter(Drafter):
    """Suffix decoding over each request's tokens and its tenant's finished outputs.

    min_probability: drafting stops below this estimated path probability. shared_tokens: finished output tokens kept
    per tenant (4 bytes each), 0 for none; max_tenants: tenants kept, least recently used go. Drafts a chain, or a
    small tree when the budget's kind is not CHAIN and its width above 1.
    """

    name = "suffix"

    def __init__(
        self,
        vocab_size: int,
        min_probability: float = MIN_PROBABILITY,
        shared_tokens: int = 32_768,
        max_tenants: int = 8,
    ) -> None:
        if not 0.0 < min_probability <= 1.0:
            raise ValueError(f"min_probability must be in (0, 1], got {min_probability}")
        check_vocab(vocab_size)
        self.vocab_size, self.min_probability = vocab_size, min_probability
        self.outputs = TenantOutputs(self.name, shared_tokens, max_tenants)
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
            pairs = grow(self._occurrences(seq), Growth.within(budget, self.min_probability))
            self.hits += bool(pairs)
            self.misses += not pairs
        return build_tree(seq.token_ids[-1], pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)

    def _occurrences(self, seq: Sequence) -> list[Occurrence]:
        text, others = OwnText.of(seq), self.outputs.text(seq)
        shared = find(others, text[-MAX_MATCH:], len(others), OTHERS_DISCOUNT)
        return longest_first([*own_occurrences(text), *shared])

    def finish(self, seq: Sequence) -> None:
        """Learn from the output, once."""
        self.outputs.learn(seq)
