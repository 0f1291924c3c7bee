"""Drafts that no honest drafter would make (algorithms.md J4), by drafters that know the plain answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

Pairs = list[tuple[int, int]]  # (parent, token), see build_tree
OVER_LONG = 50


class Adversary(Drafter):
    """One kind of malice. ``answers``: the plain output of every prompt and temperature."""

    name = "adversary"

    def __init__(self, kind: str, answers: Mapping[tuple[tuple[int, ...], float], Seq[int]], vocab_size: int) -> None:
        self.answers, self.vocab_size = answers, vocab_size
        self.generator = torch.Generator().manual_seed(3)
        self._pairs = KINDS[kind]

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """Only build_tree keeps it within the budget."""
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            answer = self.answers[seq.request.prompt_token_ids, seq.request.params.temperature]
            pairs = self._pairs(self, list(answer[seq.num_output :]), seq, budget.num_draft_tokens)
            root, depth = seq.token_ids[-1], budget.num_draft_tokens
            trees.append(build_tree(root, pairs, self.vocab_size, budget.max_nodes, depth))
        return trees

    def _wrong(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """A chain of wrong tokens, each with a wrong sibling."""
        off = [(token + 1) % self.vocab_size for token in answer[:k]]
        pairs: Pairs = []
        for token in off:
            parent = len(pairs) - 2 if pairs else -1
            pairs += [(parent, token), (parent, (token + 1) % self.vocab_size)]
        return pairs

    def _random(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """A random tree of random tokens."""
        tokens = torch.randint(0, self.vocab_size, (2 * k,), generator=self.generator).tolist()
        picks = torch.rand(2 * k, generator=self.generator).tolist()
        return [(int(pick * (i + 1)) - 1, token) for i, (pick, token) in enumerate(zip(picks, tokens, strict=True))]

    def _empty(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        return []

    def _over_long(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """The right tokens past every budget, then the last one again and again."""
        return _path([*answer, *[seq.token_ids[-1]] * OVER_LONG], at=0)

    def _end(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """The right tokens with the end of the sequence among them, before its time."""
        ends = seq.request.params.stop_token_ids
        tokens = [*answer[:2], *ends, *answer[2:]]
        return [*((-1, token) for token in ends), *_path(tokens, at=len(ends))]

    def _unknown(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """Ids that no vocabulary has, with right tokens below them, and the right path beside them."""
        unknown = [self.vocab_size, -1, 10**9]
        below = [(i, token) for i, token in enumerate(answer[: len(unknown)])]
        return [*((-1, token) for token in unknown), *below, *_path(answer[:2], at=len(unknown) + len(below))]

    def _behind(self, answer: list[int], seq: Sequence, k: int) -> Pairs:
        """The right path, every token of it behind a wrong sibling: whatever is accepted must be compacted."""
        pairs: Pairs = []
        parent = -1
        for token in answer[:k]:
            pairs += [(parent, (token + 1) % self.vocab_size), (parent, token)]
            parent = len(pairs) - 1
        return pairs


def _path(token_ids: Seq[int], at: int) -> Pairs:
    """A chain from the root; its first pair stands at index ``at``."""
    return [(-1 if i == at else i - 1, token) for i, token in enumerate(token_ids, at)]


KINDS: dict[str, Callable[[Adversary, list[int], Sequence, int], Pairs]] = {
    "always wrong": Adversary._wrong,
    "random": Adversary._random,
    "empty": Adversary._empty,
    "over-long": Adversary._over_long,
    "end of sequence inside": Adversary._end,
    "out of vocabulary": Adversary._unknown,
    "right behind wrong": Adversary._behind,
}
