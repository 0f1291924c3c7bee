"""Tiny runners with the feature drafter, and what its state must be, written from the formulas.

The references: the target over whole texts, then rows (t_{i+1}, h_i) at position i through the head, then a path alone,
row m + s = (its s-th token, the output of the row before) (algorithms.md D, E).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.table import PageTable
from paceline.layers.linear import Linear
from paceline.models.base import ForwardContext
from paceline.models.llama import LlamaModel
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.candidates import choose
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.mtp import MtpHead
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.static_trees import EAGLE_TREE
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Sampling
from tests.support.tiny_model import VOCAB, primary_of, tiny_request, tiny_runner

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
BUDGETS = {
    "chain": DraftBudget(4, 4, TreeKind.CHAIN),
    "comb": DraftBudget(3, 3),
    "static": DraftBudget(4, 4, tree_nodes=15),
    "dynamic": DraftBudget(4, 3, TreeKind.DYNAMIC),
}
SERVED = [(b, s) for b in BUDGETS for s in DraftSampling if (b, s) != ("dynamic", SAMPLED)]


class Shaped(FeatureDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape: DraftBudget | None = None
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        shape = self.shape
        if shape is not None:
            budgets = [
                replace(shape, num_draft_tokens=min(b.num_draft_tokens, shape.num_draft_tokens)) for b in budgets
            ]
        self.trees = super().propose(seqs, budgets)
        return self.trees


class Recorder(DraftHead):
    """A head that keeps what it is asked and answers."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.calls = head, list[tuple[ForwardBatch, torch.Tensor]]()
        self.kv_layers, self.hidden_size = head.kv_layers, head.hidden_size

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        self.calls.append((context.batch, self.head.forward(token_ids, hidden, context)))
        return self.calls[-1][1]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self.head.logits(output)


def make(dtype: str = "bf16", shape: str | DraftBudget | None = None, **options: Any) -> ModelRunner:
    """A runner with an untrained MTP head and trees of ``shape``."""
    choices = EAGLE_TREE if shape == "static" else ()
    sampling = options.pop("sampling", COUPLED)
    expand_above = options.pop("expand_above", None)
    defaults: dict[str, Any] = {
        "prefix_cache": False,
        "num_draft_tokens": 4,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
    }
    runner = tiny_runner(dtype, drafter="mtp", **(defaults | options))
    made = primary_of(runner)
    assert isinstance(made, FeatureDrafter)
    runner.drafter = Shaped(
        "mtp", runner.model, made.head, runner.kv, runner.attention, 4, sampling, choices, expand_above
    )  # fmt: skip
    runner.drafter.shape = BUDGETS[shape] if isinstance(shape, str) else shape
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def make_agreeable(runner: ModelRunner) -> None:
    """Target and drafter look at little but their last token, and not quite alike: all accepted lengths occur."""
    head = drafter_of(runner).head
    assert isinstance(head, MtpHead)
    for block in (*runner.model.layers, head.module.block):  # type: ignore[attr-defined]
        block.o_proj._packed.mul_(0.02)
        block.down_proj._packed.mul_(0.02)
    join = torch.cat((torch.eye(runner.model.spec.hidden_size), 0.1 * torch.eye(runner.model.spec.hidden_size)), dim=1)
    head.module.eh_proj = Linear(join.to(runner.dtype))
    assert isinstance(runner.model, LlamaModel)
    runner.model.lm_head = Linear(runner.model.embedding.roll(1, 0) * 0.25, out_float32=True)


def prefill(
    runner: ModelRunner, tokens: list[int], *, steps: int = 100, index: int = 0, **params: Unpack[Sampling]
) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, index=index, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


def draft_kv(runner: ModelRunner, slots: torch.Tensor) -> torch.Tensor:
    (layer,) = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    return torch.stack(runner.kv.read(layer, slots.long()))


def head_rows(runner: ModelRunner, segment: Segment, hidden: torch.Tensor) -> torch.Tensor:
    batch = ForwardBatch.build([segment])
    head = drafter_of(runner).head
    return head.forward(batch.token_ids, hidden, ForwardContext.build(batch, runner.kv, runner.attention))


@contextmanager
def committed_alone(runner: ModelRunner, tokens: Seq[int]) -> Iterator[tuple[PageTable, torch.Tensor]]:
    """The draft rows of a text by formula, in pages of their own, and the head's outputs. t_m is the last token."""
    table, m = PageTable(runner.allocator, runner.page_size), len(tokens) - 1
    table.ensure(m + 16)
    batch = ForwardBatch.build([Segment.linear(tokens[:m], 0, table.slots)])
    hidden = runner.model.forward(ForwardContext.build(batch, runner.kv, runner.attention))
    yield table, head_rows(runner, Segment.linear(tokens[1:], 0, table.slots), hidden)
    table.release()


def state_is_exact(runner: ModelRunner, seq: Sequence) -> bool:
    """Whether the draft KV of all m rows, a_{m-1} and the candidates are those of a fresh draft prefill, in bits."""
    assert seq.draft is not None
    drafter, m = drafter_of(runner), seq.num_computed
    assert (seq.draft_rows, m) == (m, len(seq.token_ids) - 1)
    with committed_alone(runner, seq.token_ids) as (table, outputs):
        logits = drafter.head.logits(outputs[-1:])
        want = choose(logits, [seq.request.params], [m + 1], drafter.width, drafter.sampling, VOCAB)
        return (
            torch.equal(draft_kv(runner, seq.table.slots[:m]), draft_kv(runner, table.slots[:m]))
            and torch.equal(seq.draft.hidden, outputs[-1:])
            and torch.equal(seq.draft.proposal_ids, want.ids)
            and torch.equal(seq.draft.proposal_probs, want.probs)
        )


def rounds_stay_exact(runner: ModelRunner, rounds: int = 10, temperature: float = 0.0) -> tuple[bool, set[int]]:
    """Over some rounds: whether the state stays exact, and the accepted lengths seen."""
    seq, accepted, exact = prefill(runner, PROMPT, steps=3, temperature=temperature), set(), True
    for _ in range(rounds):
        exact = exact and state_is_exact(runner, seq)
        accepted.add(runner.decode([seq])[0].round.num_accepted)
    exact = exact and state_is_exact(runner, seq)
    seq.table.release()
    assert runner.allocator.check_integrity() == []
    return exact, accepted


def ragged(runner: ModelRunner) -> list[Sequence]:
    prompts = [PROMPT, PROMPT[:2], [*range(10, 31)], [7]]
    return [prefill(runner, p, index=i, temperature=[0.0, 1.0, 0.7, 1.0][i]) for i, p in enumerate(prompts)]
