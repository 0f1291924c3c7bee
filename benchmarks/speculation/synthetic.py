"""Synthetic acceptance, for benchmarks of models whose heads were never trained.

The real head runs, at its full cost; only the tokens it proposes are exchanged: for the target's own next tokens, known
from a plain run of the same requests, as far as a table of rates says, and for a wrong one after them. The target
still verifies every token, so the text must equal the plain run's. Whatever is measured with it says so: ``LABEL``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import numpy as np

from paceline.layers.upload import staged
from paceline.request import UINT64_MAX
from paceline.spec_decode.base import DraftBudget, Drafter
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.spec_decode.unread import UnreadChains

LABEL = "SYNTHETIC ACCEPTANCE: draft tokens are drawn from a table of rates, heads run at full cost"


@dataclass(frozen=True)
class Rates:
    """``table[d]``: probability that the draft token at depth d+1 is right when all before it are."""

    table: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.table or not all(0.0 <= rate <= 1.0 for rate in self.table):
            raise ValueError(f"rates must be probabilities, got {self.table}")

    def acceptance_length(self, num_draft_tokens: int) -> float:
        """Expected tokens of a round, the bonus counted."""
        return 1.0 + math.fsum(accumulate(self.table[:num_draft_tokens], mul))

    def accepted(self, seed: int, request_id: str, position: int, depth: int) -> int:
        """Draft tokens that are right in the round whose root stands at ``position``; depends on nothing else."""
        state = (
            seed * 0x9E3779B97F4A7C15 + zlib.crc32(request_id.encode()) * 0xD1B54A32D192ED03 + position
        ) & UINT64_MAX
        for right in range(depth):
            state, uniform = _draw(state)
            if right >= len(self.table) or uniform >= self.table[right]:
                return right
        return depth


RATES = {"tau2": Rates((0.60, 0.42, 0.40, 0.40)), "tau3": Rates((0.79, 0.72, 0.68, 0.66))}


def _draw(state: int) -> tuple[int, float]:
    """splitmix64 (Steele et al. 2014): the next state, and a number in [0, 1)."""
    state = (state + 0x9E3779B97F4A7C15) & UINT64_MAX
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MAX
    return state, ((z ^ (z >> 31)) >> 11) / float(1 << 53)


class SyntheticDrafts:
    """Exchanges the tokens that a drafter proposes.

    Its methods are replaced on that one drafter, not wrapped in another, so that whoever asks what kind of drafter it
    is still gets the true answer. Chains only.
    """

    def __init__(
        self, drafter: Drafter, plain: Mapping[str, Seq[int]], rates: Rates, seed: int, vocab_size: int
    ) -> None:
        """plain: output tokens of the plain run, by request id; beyond their end every draft is wrong."""
        self.plain, self.rates, self.seed, self.vocab_size = plain, rates, seed, vocab_size
        self.exchanged = 0  # trees; a measurement that exchanged none was none
        self._drafter, self._propose, self._propose_unread = drafter, drafter.propose, drafter.propose_unread
        setattr(drafter, "propose", self.propose)  # noqa: B010  (a method is no attribute to mypy)
        setattr(drafter, "propose_unread", self.propose_unread)  # noqa: B010

    def restore(self) -> None:
        """Take the exchange off the drafter."""
        del self._drafter.__dict__["propose"], self._drafter.__dict__["propose_unread"]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._exchange(seq, tree) for seq, tree in zip(seqs, self._propose(seqs, budgets), strict=True)]

    def propose_unread(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> UnreadChains | None:
        """See Drafter. The drafted tokens are left unread, as they would be without the exchange."""
        chains = self._propose_unread(seqs, budgets)
        if chains is None:
            return None
        trees = [self._exchange(seq, tree) for seq, tree in zip(seqs, chains.blank_trees(seqs), strict=True)]
        tokens = np.array([token for tree in trees for token in tree.token_ids[1:]], dtype=np.int64)
        return replace(chains, tokens=staged(tokens, chains.tokens.device))

    def _exchange(self, seq: Sequence, tree: DraftTree) -> DraftTree:
        depth = tree.num_draft_tokens
        if depth == 0:
            return tree
        if not tree.is_chain:
            raise ValueError("synthetic acceptance knows chains only")
        self.exchanged += 1
        request_id, at = seq.request.request_id, seq.num_output
        truth = tuple(self.plain[request_id][at : at + depth])
        right = min(self.rates.accepted(self.seed, request_id, len(seq.token_ids) - 1, depth), len(truth))
        wrong = (truth[right] + 1 if right < len(truth) else 0) % self.vocab_size
        tokens = (tree.token_ids[0], *truth[:right], *(wrong,) * (depth - right))
        return replace(tree, token_ids=tokens, draft_probs=None)
