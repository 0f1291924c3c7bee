"""The drafter's place on a prefill node that sends hidden rows instead of draft KV (algorithms.md H2).

It drafts nothing and has no KV: it keeps the rows that the decode node's drafter will digest, until they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

KEPT = "rows to hand over"  # in Sequence.memory


class RowExporter(Drafter):
    """Collects hidden rows of prompts."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        row_width: int,
        aux_layers: tuple[int, ...] = (),
        fuse: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """name: of the decode node's drafter. row_width: elements of a row as it is sent. fuse: applied before, for
        heads that fuse several target layers and whose ``fc`` is held here; None sends raw rows."""
        self.name, self.row_width, self.aux_layers = name, row_width, aux_layers
        self.fused_width = row_width if fuse is not None else 0
        self.needs_extend = row_width > 0
        self._vocab_size, self._fuse = vocab_size, fuse

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter: keep the rows."""
        for item in items:
            rows = item.hidden.clone() if self._fuse is None else self._fuse(item.hidden)
            kept = item.seq.memory.setdefault(KEPT, [])
            assert isinstance(kept, list)
            kept.append((item.start, rows))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """Roots alone: nothing decodes here."""
        return [build_tree(seq.token_ids[-1], [], self._vocab_size, 1, 0) for seq in seqs]


def take_rows(seq: Sequence) -> list[tuple[int, torch.Tensor]]:
    """The pieces (first row, rows [n, row_width]) kept since the last call, in order."""
    kept = seq.memory.pop(KEPT, [])
    assert isinstance(kept, list)
    return kept


def export_rows(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter: the target's own hidden rows."""
    return plan_weightless(RowExporter(name, model.spec.vocab_size, model.spec.hidden_size))
