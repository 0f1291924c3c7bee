"""Suffix decoding (Oliaro et al., arXiv 2411.04975; algorithms.md C2b): the likeliest continuation of the longest
stretches of recent text that stood before, in the request itself or in the tenant's finished outputs.

What differs from the paper: no suffix trees are kept. The occurrences of the last tokens are searched for in both
texts and ranked together (copying.py), which counts what the trees' nodes would count, MAX_OCCURRENCES of each text
at most. Path probabilities are count ratios times the confidence in a match of that length, so a match of L tokens
drafts some 4 L where the paper bounds the draft by floor(factor * L + offset), and the longest match leads where
the paper takes the best score.
"""

from __future__ import annotations

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.copying import (
    MAX_MATCH,
    MIN_PROBABILITY,
    CopyingDrafter,
    CopyLimits,
    Occurrence,
    OwnText,
    find,
    grow,
    longest_first,
    own_occurrences,
)
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.drafters.tenants import TenantOutputs
from paceline.spec_decode.sequence import Sequence

OTHERS_DISCOUNT = 0.5  # a match in another text counts as that much shorter: the request's own win ties


class SuffixDrafter(CopyingDrafter):
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
        super().__init__(vocab_size)
        self.min_probability = min_probability
        self.outputs = TenantOutputs(self.name, shared_tokens, max_tenants)

    def _pairs(self, seq: Sequence, budget: DraftBudget) -> list[tuple[int, int]]:
        return grow(self._occurrences(seq), CopyLimits.within(budget, self.min_probability))

    def _occurrences(self, seq: Sequence) -> list[Occurrence]:
        text, others = OwnText.of(seq), self.outputs.text(seq)
        shared = find(others, text[-MAX_MATCH:], len(others), OTHERS_DISCOUNT)
        return longest_first([*own_occurrences(text), *shared])

    def finish(self, seq: Sequence) -> None:
        """Learn from the output, once."""
        self.outputs.learn(seq)


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    return plan_weightless(SuffixDrafter(model.spec.vocab_size))
