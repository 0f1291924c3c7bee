"""Tiny runners whose drafter is Medusa."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Unpack

import torch

from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.medusa import MedusaDrafter, MedusaHeads
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.static_trees import RankPath
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Sampling
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
HIDDEN = 64
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
TENSOR = dict[str, torch.Tensor]
BUDGETS = {
    "zero": DraftBudget(0, 4),
    "one": DraftBudget(1, 4),
    "chain": DraftBudget(3, 4, TreeKind.CHAIN),
    "static": DraftBudget(4, 4, TreeKind.STATIC, 16),
    "dynamic": DraftBudget(4, 4, TreeKind.DYNAMIC, 16),
    "deeper than the heads": DraftBudget(8, 2),
}


def tensors(num_heads: int = 4, blocks: int = 1, vocab: int | None = VOCAB, seed: int = 5) -> TENSOR:
    """Random heads in FasterDecoding's names; ``vocab`` None has no vocabulary matrices."""
    generator = torch.Generator().manual_seed(seed)
    found: TENSOR = {}
    for head in range(num_heads):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1
            found[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=generator) * 0.1
        if vocab is not None:
            found[f"{head}.{blocks}.weight"] = torch.randn(vocab, HIDDEN, generator=generator) * 0.35
    return found


class Shaped(MedusaDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape = BUDGETS["chain"]
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        depths = [min(b.num_draft_tokens, self.shape.num_draft_tokens) for b in budgets]
        self.trees = super().propose(seqs, [replace(self.shape, num_draft_tokens=d) for d in depths])
        return self.trees


def make(
    shape: str = "chain",
    sampling: DraftSampling = COUPLED,
    dtype: str = "bf16",
    heads: TENSOR | None = None,
    width: int | None = None,
    choices: Seq[RankPath] | None = None,
    **options: Any,
) -> ModelRunner:
    """A tiny runner whose drafter is Medusa."""
    defaults: dict[str, Any] = {
        "drafter": "none",
        "num_draft_tokens": 8,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
        "prefix_cache": False,
    }
    runner = tiny_runner(dtype, **(defaults | options))
    if width is None:
        width = 1 if sampling is SAMPLED else 4
    built = MedusaHeads(runner.model, tensors() if heads is None else heads)
    drafter = Shaped(runner.model, built, width, choices, sampling)
    drafter.shape = BUDGETS[shape]
    runner.drafter = drafter
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int = 100, **params: Unpack[Sampling]) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq
