"""What a drafter is. Draft tokens never change the text (the acceptance rule sees to that), only its speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.kvcache.layout import KvLayer
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree


@dataclass(frozen=True)
class DraftBudget:
    """Bounds of one sequence's next tree, decided before the round's randomness (algorithms.md B7)."""

    num_draft_tokens: int  # K: depth of the tree; 0 is a plain decode step
    tree_width: int = 1  # candidates per depth; 1 is a chain

    @property
    def max_nodes(self) -> int:
        """Nodes, root included."""
        return 1 + self.num_draft_tokens * self.tree_width


@dataclass(frozen=True)
class ExtendItem:
    """New true hidden rows of one sequence: rows start..end-1, each h_i after the target's final norm.

    ``seq.token_ids[end]`` is known (the next prompt token, or the token just sampled). ``final`` asks for
    proposals afterwards; a prefill chunk before the last does not.
    """

    seq: Sequence
    start: int
    end: int
    hidden: torch.Tensor  # [end - start, hidden_size]
    final: bool


class Drafter(ABC):
    """Proposes trees. Per-sequence state lives on the Sequence, weights and scratch here."""

    name: str
    kv_layers: tuple[KvLayer, ...] = ()  # further layers of the target's pages
    lookahead: int = 0  # tokens past row i that its draft KV rows depend on (algorithms.md E7)
    needs_hidden: bool = False  # whether extend must see the target's hidden rows

    @abstractmethod
    def extend(self, items: Seq[ExtendItem]) -> None:
        """Digest committed rows, prefill or decode; with ``final`` leave proposals in ``seq.draft``."""

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """One tree per sequence, rooted at its last committed token, within its budget."""
