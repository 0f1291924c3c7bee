"""Prompt lookup (Saxena 2023; algorithms.md C2): what followed the last tokens when they stood here before.

The longest match goes first (up to MAX_MATCH tokens, down to one); of equally long ones the continuation that came
most often, then the most recent. The draft is as long as the match makes likely (copying.py), at most the budget's K.
With a tree width above 1 the other continuations, those of shorter matches too, become branches. The sequence's own
tokens, prompt and committed output, are all there is.
"""

from __future__ import annotations

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.copying import CopyingDrafter, CopyLimits, OwnText, grow, own_occurrences
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.sequence import Sequence


class NgramDrafter(CopyingDrafter):
    """Prompt lookup over prompt and committed output."""

    name = "ngram"

    def _pairs(self, seq: Sequence, budget: DraftBudget) -> list[tuple[int, int]]:
        return grow(own_occurrences(OwnText.of(seq)), CopyLimits.within(budget))


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    return plan_weightless(NgramDrafter(model.spec.vocab_size))
