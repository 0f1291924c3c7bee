"""Prompt lookup (Saxena 2023; algorithms.md C2): what followed the last n tokens when they stood here before.

The longest n wins (MAX_NGRAM down to 1); among equal matches the most recent. With a tree width above 1, up to that
many different matches of the winning lengths are merged into one tree. The sequence's own tokens are the whole
state: an index from n-gram to the positions after it, extended by the committed tokens of each round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree, build_tree

MAX_NGRAM = 3
MAX_OCCURRENCES = 8  # most recent ends kept per n-gram: bounds memory and the search


@dataclass
class NgramIndex:
    """Where each n-gram of a token list ends. ``ends[gram]`` are positions just after it, oldest first."""

    indexed: int = 0  # tokens digested
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def update(self, token_ids: Seq[int]) -> None:
        """Index every n-gram that is followed by a token; the suffix itself is not (it would match itself)."""
        for end in range(max(self.indexed, 1), len(token_ids)):
            for n in range(1, min(MAX_NGRAM, end) + 1):
                found = self.ends.setdefault(tuple(token_ids[end - n : end]), [])
                found.append(end)
                if len(found) > MAX_OCCURRENCES:
                    del found[0]
        self.indexed = max(self.indexed, len(token_ids))

    def continuations(self, token_ids: Seq[int], length: int, width: int) -> list[list[int]]:
        """Up to ``width`` different continuations of at most ``length`` tokens, best first."""
        found: list[list[int]] = []
        for n in range(min(MAX_NGRAM, len(token_ids) - 1), 0, -1):
            for end in reversed(self.ends.get(tuple(token_ids[-n:]), ())):
                continuation = list(token_ids[end : end + length])
                if continuation not in found:
                    found.append(continuation)
                if len(found) == width:
                    return found
        return found


class NgramDrafter(Drafter):
    """Prompt lookup over prompt and committed output."""

    name = "ngram"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.hits = 0  # rounds with at least one draft token
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows; tokens are indexed when proposing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        pairs: list[tuple[int, int]] = []
        if budget.num_draft_tokens:
            index = seq.scratch.setdefault(self.name, NgramIndex())
            assert isinstance(index, NgramIndex)
            index.update(seq.token_ids)
            for tokens in index.continuations(seq.token_ids, budget.num_draft_tokens, budget.tree_width):
                parent = -1
                for token_id in tokens:
                    pairs.append((parent, token_id))
                    parent = len(pairs) - 1
            self.hits += bool(pairs)
            self.misses += not pairs
        return build_tree(seq.token_ids[-1], pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)
