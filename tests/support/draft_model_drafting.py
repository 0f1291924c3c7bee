"""Tiny runners with a draft model: the target's own weights, more or less blurred."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Unpack

import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.base import AuxCapture, ForwardContext
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.draft_model import DraftModelDrafter
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.static_trees import EAGLE_TREE
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Sampling
from tests.support.tiny_model import tiny_request, tiny_runner, tiny_spec, tiny_weights

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
LAYERS = 2  # of the tiny target
BUDGETS = {
    "zero": DraftBudget(0, 4),
    "one": DraftBudget(1, 4, TreeKind.CHAIN),
    "chain": DraftBudget(3, 4, TreeKind.CHAIN),
    "long chain": DraftBudget(8, 1),
    "comb": DraftBudget(3, 3),
    "static": DraftBudget(4, 4, tree_nodes=15),
    "dynamic": DraftBudget(4, 3, TreeKind.DYNAMIC),
}


class Shaped(DraftModelDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape = BUDGETS["chain"]
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        depths = [min(b.num_draft_tokens, self.shape.num_draft_tokens) for b in budgets]
        own = [replace(self.shape, num_draft_tokens=depth) for depth in depths]
        self.trees = super().propose(seqs, own)
        for seq, budget, tree in zip(seqs, own, self.trees, strict=True):
            assert tree.num_nodes <= budget.max_nodes
            assert max(tree.depths) <= budget.num_draft_tokens
            assert tree.token_ids[0] == seq.token_ids[-1]
        return self.trees


class CountingModel(LlamaModel):
    """Keeps how many rows each sequence had in each forward."""

    rows: list[list[int]]

    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """See TargetModel."""
        self.rows.append([len(segment.token_ids) for segment in context.batch.segments])
        return super().forward(context, aux)


def build_draft(dtype: torch.dtype, noise: float = 0.0, **changes: Any) -> CountingModel:
    """The target's own weights, blurred by ``noise``; ``changes`` are ModelSpec's."""
    spec = replace(tiny_spec(), **changes)
    tensors = dict(tiny_weights(spec, torch.float32)._tensors)
    generator = torch.Generator().manual_seed(11)
    for name, value in tensors.items():
        if value.dim() == 2:
            value = value + noise * torch.randn(value.shape, generator=generator)
        tensors[name] = value.to(dtype)
    model = CountingModel(spec, WeightBag(tensors), dtype, torch.device("cpu"), LAYERS, LayerOwner.DRAFT)
    model.rows = []
    return model


def make(
    shape: str | DraftBudget = "chain",
    sampling: DraftSampling = COUPLED,
    dtype: str = "bf16",
    noise: float = 0.0,
    draft: dict[str, Any] | None = None,
    **options: Any,
) -> ModelRunner:
    """A tiny runner with a draft model: the target itself unless ``noise`` or ``draft`` (ModelSpec's) say otherwise."""
    defaults: dict[str, Any] = {
        "drafter": "none",
        "num_draft_tokens": 8,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
        "prefix_cache": False,
    }
    runner = tiny_runner(dtype, **(defaults | options))
    model = build_draft(runner.dtype, noise, **(draft or {}))
    layout = KvLayout((*runner.model.kv_layers, *model.kv_layers), runner.dtype)
    runner.kv = KvPool(layout, runner.kv.num_pages, runner.kv.page_size)
    tree = EAGLE_TREE if shape == "static" else ()
    drafter = Shaped(runner.model, model, runner.kv, runner.attention, LAYERS, 4, sampling, tree)
    drafter.shape = BUDGETS[shape] if isinstance(shape, str) else shape
    runner.drafter = drafter
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def model_of(runner: ModelRunner) -> CountingModel:
    model = drafter_of(runner).draft
    assert isinstance(model, CountingModel)
    return model


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int = 100, **params: Unpack[Sampling]) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


def draft_kv(runner: ModelRunner, seq: Sequence, rows: int) -> torch.Tensor:
    """[layers, 2, rows, heads, dim] of the sequence's first rows."""
    slots = seq.table.slots[:rows].long()
    layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    return torch.stack([torch.stack(runner.kv.read(layer, slots)) for layer in layers])


def plain_logits(runner: ModelRunner, token_ids: Seq[int]) -> torch.Tensor:
    """Logits after each token, of the draft model over the text alone, in a pool of its own. float32 [len, V]."""
    model = model_of(runner)
    kv = KvPool(runner.kv.layout, 1, len(token_ids))
    segment = Segment.linear(token_ids, 0, torch.arange(len(token_ids), dtype=torch.int32))
    batch = ForwardBatch.build([segment])
    return model.logits(model.forward(ForwardContext.build(batch, kv, runner.attention)))


def full_rounds(runner: ModelRunner, temperature: float, **how: int) -> set[int]:
    """Accepted per round, the last rounds (cut by max_tokens) left out."""
    requests = [tiny_request(index=i, temperature=temperature, max_tokens=40) for i in range(4)]
    engine = ColocatedEngine(runner, **({"chunk_tokens": 4} | how))
    return {n for done in engine.generate(requests) for n in done.stats.accepted_per_round[:-1]}


def check_rows_against_fresh_prefill(shape: str, temperature: float, noise: float) -> set[int]:
    """J5 after every round: the rows called exact, and after the next propose all m. Returns accepted lengths."""
    runner = make(shape, noise=noise)
    seq = prefill(runner, PROMPT, steps=3, temperature=temperature)
    accepted = set()
    for _ in range(14):
        before = seq.num_computed
        accepted.add(runner.decode([seq])[0].round.num_accepted)
        fresh = prefill(runner, seq.token_ids[:-1], temperature=temperature)
        m = seq.num_computed
        assert fresh.draft_rows == m == len(seq.token_ids) - 1
        assert before < seq.draft_rows <= m  # t_m of the round before is always kept
        assert torch.equal(draft_kv(runner, seq, seq.draft_rows), draft_kv(runner, fresh, seq.draft_rows))
        drafter_of(runner).propose([seq], [DraftBudget(8, 4)])
        assert seq.draft_rows == m
        assert torch.equal(draft_kv(runner, seq, m), draft_kv(runner, fresh, m))
        fresh.table.release()
    return accepted
