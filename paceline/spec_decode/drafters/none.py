"""No drafting: every round is a plain decode step through the same path (algorithms.md A6)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree


class NoDrafter(Drafter):
    """Trees of the root alone."""

    name = "none"

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps no state."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [DraftTree((seq.token_ids[-1],), (-1,), (0,), None, self.name) for seq in seqs]


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    return plan_weightless(NoDrafter())
