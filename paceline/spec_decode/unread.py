"""Chains that were drafted on the device and that the host has not read: a round then waits for one copy alone.

Nothing that the host does before the verdict depends on their tokens: how many there are, where their rows stand and
which slots they write follow from lengths. The tokens go from the draft loop into the target's batch and into the walk
on the device, and come back with the verdict. Until then a tree holds the root and BLANK in their places.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from paceline.layers.upload import Int64, staged_index
from paceline.models.late_tokens import LateTokens
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

BLANK = 0
NEVER = -3  # in place of a draft outside the vocabulary: no sampled token equals it, not even one that is BROKEN


@dataclass(frozen=True)
class UnreadChains:
    """One chain for every sequence of a batch, sequence by sequence."""

    tokens: torch.Tensor  # int64 [sum of depths], on the device, perhaps not computed yet
    depths: tuple[int, ...]  # drafted tokens of each; 0: the root alone
    drafter: str  # who made them
    vocab_size: int

    @cached_property
    def rows(self) -> Int64:
        """Where the drafted tokens stand among all nodes, roots included: int64 [sum of depths]."""
        depths = np.array(self.depths, dtype=np.int64)
        roots = np.repeat(np.arange(1, len(depths) + 1), depths)  # as many stand before each drafted token
        return np.arange(int(depths.sum())) + roots

    def blank_trees(self, seqs: Seq[Sequence]) -> list[DraftTree]:
        """Chains of the right shape."""
        return [
            DraftTree(
                (seq.token_ids[-1], *(BLANK,) * depth), tuple(range(-1, depth)), tuple(range(depth + 1)), None,
                self.drafter,
            )
            for seq, depth in zip(seqs, self.depths, strict=True)
        ]  # fmt: skip

    def for_target(self) -> LateTokens:
        """What the target verifies. A token outside the vocabulary is no row of its embedding: another stands in, and
        the walk never reaches it."""
        return LateTokens(self.tokens.clamp(0, self.vocab_size - 1), self.rows)

    @cached_property
    def for_walk(self) -> torch.Tensor:
        """Tokens as the walk compares them, int32; NEVER where one is outside the vocabulary."""
        known = self.tokens.clamp(0, self.vocab_size - 1)
        return torch.where(known == self.tokens, known, NEVER).to(torch.int32)

    def put_into_walk(self, token_ids: torch.Tensor) -> None:
        """token_ids: int32 [all nodes], of the blank trees, on the device."""
        token_ids.index_copy_(0, staged_index(self.rows, token_ids.device), self.for_walk)

    def read_trees(self, seqs: Seq[Sequence], tokens: Seq[int]) -> list[DraftTree]:
        """The trees as ``propose`` would have made them. tokens: ``for_walk``, read. A chain ends before a token
        outside the vocabulary."""
        trees, at = [], 0
        for seq, depth in zip(seqs, self.depths, strict=True):
            pairs = [(i - 1, token) for i, token in enumerate(tokens[at : at + depth])]
            tree = build_tree(seq.token_ids[-1], pairs, self.vocab_size, depth + 1, depth)
            trees.append(replace(tree, drafter=self.drafter))
            at += depth
        return trees


@dataclass(frozen=True)
class UnreadWalk:
    """What the target made of a batch's unread chains, all of one depth D: on the device, perhaps not computed yet."""

    depth: int  # D, at least 1
    starts: tuple[int, ...]  # of each sequence, the position of its root
    rows: torch.Tensor  # what a drafter's ``extend`` is given, [S * (D + 1), row_width]
    accepted: torch.Tensor  # int64 [S], drafted tokens of each
    tokens: torch.Tensor  # int64 [S, D + 1]: the accepted ones and the new one; what follows means nothing

    @classmethod
    def of(
        cls, chains: UnreadChains, seqs: Seq[Sequence], rows: torch.Tensor, accepted: torch.Tensor, new: torch.Tensor
    ) -> UnreadWalk | None:
        """accepted, new: int32 [S], drafted tokens of each chain, and the token behind them. None where depths differ,
        or nothing was drafted."""
        depth = chains.depths[0]
        if not depth or any(other != depth for other in chains.depths):
            return None
        accepted, new = accepted.to(torch.int64), new.unsqueeze(1)
        tokens = torch.cat((chains.for_walk.view(-1, depth), new), dim=1)
        tokens = tokens.scatter(1, accepted.unsqueeze(1), new).to(torch.int64).clamp(0, chains.vocab_size - 1)
        return cls(depth, tuple(seq.num_computed for seq in seqs), rows, accepted, tokens)
