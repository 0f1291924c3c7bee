"""What a drafter is. Draft tokens never change the text (the acceptance rule sees to that), only its speed."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.kvcache.layout import KvLayer
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.speculation import TreeKind as TreeKind

if TYPE_CHECKING:
    from paceline.spec_decode.unread import UnreadChains, UnreadWalk


class DraftSampling(enum.StrEnum):
    """How candidates are chosen from the drafter's distribution q."""

    COUPLED = "coupled"  # top-k of log q + the target's own noise at that position (algorithms.md B10); greedy at T=0
    GREEDY = "greedy"  # top-k of q: q counts as one-hot (algorithms.md B2)
    SAMPLED = "sampled"  # drawn from q without replacement, by noise of their own; trees carry q (B1, B6)


@dataclass(frozen=True)
class DraftBudget:
    """Bounds of one sequence's next tree, decided before the round's randomness (algorithms.md B7)."""

    num_draft_tokens: int  # K: depth of the tree; 0 is a plain decode step
    tree_width: int = 1  # candidates per expanded node; 1 is a chain
    tree: TreeKind = TreeKind.STATIC
    tree_nodes: int = 0  # nodes besides the root at most; 0: num_draft_tokens * tree_width
    min_confidence: float = 0.0  # stop drafting below this q of the best candidate (I3d); 0 never stops

    @property
    def max_nodes(self) -> int:
        """Nodes, root included."""
        if self.tree is TreeKind.CHAIN or self.tree_width == 1:
            return 1 + self.num_draft_tokens
        if self.num_draft_tokens == 0:
            return 1
        return 1 + (self.tree_nodes or self.num_draft_tokens * self.tree_width)


@dataclass(frozen=True)
class ExtendItem:
    """New true hidden rows of one sequence: rows start..end-1.

    ``hidden`` holds h_i after the target's final norm, or, for a drafter with ``aux_layers``, the residual stream
    entering each of those layers, side by side. ``seq.token_ids[end]`` is known (the next prompt token, or the token
    just sampled). ``final`` asks for proposals afterwards; a prefill chunk before the last does not.
    """

    seq: Sequence
    start: int
    end: int
    hidden: torch.Tensor  # [end - start, hidden_size], or [end - start, len(aux_layers) * hidden_size]
    final: bool
    fused: bool = False  # ``hidden`` went through ``Drafter.fuse`` already: [end - start, fused_width]


Settle = Callable[[Seq[ExtendItem]], None]


class Drafter(ABC):
    """Proposes trees. Per-sequence state lives on the Sequence, weights and buffers here."""

    name: str
    kv_layers: tuple[KvLayer, ...] = ()  # further layers of the target's pages
    lookahead: int = 0  # tokens past row i that its draft KV rows depend on (algorithms.md E7)
    needs_extend: bool = False  # whether extend must see every committed row
    needs_argmax: bool = False  # whether observe wants the target's best token at every node of its trees
    aux_layers: tuple[int, ...] = ()  # target layers whose input rows extend is given instead of h
    state_width: int = 0  # elements of a row of DraftState.hidden; 0: the drafter keeps no such rows
    row_width: int = 0  # elements of a hidden row that extend reads; 0: it reads tokens alone
    fused_width: int = 0  # of the same row after ``fuse``; 0: there is nothing to fuse

    hits: int = 0  # rounds in which a drafter that copies earlier text found something to draft
    misses: int = 0  # and in which it did not

    @property
    def primary(self) -> Drafter:
        """The one drafter that may have KV layers, rows and state: itself, unless it stands for several."""
        return self

    @abstractmethod
    def extend(self, items: Seq[ExtendItem]) -> None:
        """Digest committed rows, prefill or decode; with ``final`` leave proposals in ``seq.draft``.

        After it ``seq.draft_rows`` says how many draft KV rows are exact. Called after a sequence's tokens were
        committed, never for one that ended.
        """

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """One tree per sequence, rooted at its last committed token, within its budget.

        May write draft KV rows into slots m..m+draft_slots(budget)-1 of the sequence's table, which nobody reads
        after the round. A sequence without draft state (nothing was handed over) gets the root alone.
        """

    def propose_unread(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> UnreadChains | None:
        """What ``propose`` would give where all of it are chains of lengths known beforehand and their tokens are made
        on the device: left there, so that the host need not wait. None where that is not so; ``propose`` then."""
        return None

    def extend_ahead(self, seqs: Seq[Sequence], walk: UnreadWalk) -> Settle | None:
        """Launch the work of the next ``extend``, over chains of this drafter's whose verdict the host has not read.

        What is returned takes the place of that ``extend`` and launches nothing; its items' hidden rows are not read.
        None where it cannot, ``extend`` then. Rows of tokens that were not accepted may be written behind the others'.
        """
        return None

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """What can be computed of hidden rows before they are sent: [T, row_width] -> [T, fused_width]."""
        return rows

    def draft_slots(self, budget: DraftBudget) -> int:
        """Slots past the m committed rows that propose may write under ``budget``."""
        return budget.max_nodes

    def observe(self, seq: Sequence, tree: DraftTree, argmax: Seq[int]) -> None:  # noqa: B027
        """The target's best token at each node of a tree this drafter made; before the round is committed.

        Only called when ``needs_argmax``. argmax: [num_nodes].
        """

    def finish(self, seq: Sequence) -> None:  # noqa: B027
        """The sequence ended here or was aborted, after one round or more: forget it, or learn from it. Idempotent.

        One that is handed over before its first round does not end here, and is not told.
        """

    def copies(self) -> dict[str, tuple[int, int]]:
        """Hits and misses of every drafter in here that was asked to copy, by its name."""
        return {self.name: (self.hits, self.misses)} if self.hits or self.misses else {}
