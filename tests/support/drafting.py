"""Drafters on their own (sequences without a model), and inside a tiny runner under a budget of the test's choice."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from paceline.engine.colocated import ColocatedEngine, Completed
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Asked
from tests.support.tiny_model import tiny_request, tiny_runner

CHAIN = DraftBudget(6, 1, TreeKind.CHAIN)
TREE = DraftBudget(6, 4, TreeKind.STATIC, 20)
BUDGETS = {
    "chain": CHAIN,
    "tree": TREE,
    "dynamic": DraftBudget(9, 3, TreeKind.DYNAMIC, 55),
    "one": DraftBudget(1),
    "one, wide": DraftBudget(1, 4),
    "zero": DraftBudget(0, 4),
}


def new_sequence(prompt: Seq[int], output: Seq[int] = (), *, salt: str = "", seed: int = 1) -> Sequence:
    """A sequence without pages."""
    params = SamplingParams(temperature=0.0, seed=seed, max_tokens=10**6)
    request = SequenceRequest("r", tuple(prompt), params, cache_salt=salt)
    seq = Sequence.start(request, PageTable(PageAllocator(1), 16))
    seq.token_ids.extend(output)
    return seq


def propose(drafter: Drafter, seq: Sequence, budget: DraftBudget = CHAIN) -> DraftTree:
    """One tree, checked for what every tree must be."""
    tree = drafter.propose([seq], [budget])[0]
    check_tree(tree, seq, budget)
    return tree


def check_tree(tree: DraftTree, seq: Sequence, budget: DraftBudget) -> None:
    """Rooted at the last token, connected, siblings distinct, within the budget."""
    assert tree.token_ids[0] == seq.token_ids[-1]
    assert (tree.parents[0], tree.depths[0]) == (-1, 0)
    assert tree.num_nodes <= budget.max_nodes
    assert max(tree.depths) <= budget.num_draft_tokens
    edges = list(zip(tree.parents[1:], tree.token_ids[1:], strict=True))
    assert len(set(edges)) == len(edges)
    for node in range(1, tree.num_nodes):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
    if budget.tree is TreeKind.CHAIN or budget.tree_width == 1:
        assert tree.is_chain


class Budgeted(Drafter):
    """A drafter under ``budget``, told the target's best tokens as soon as the target has computed them."""

    def __init__(self, inner: Drafter, budget: DraftBudget) -> None:
        self.inner, self.budget, self.name = inner, budget, inner.name
        self._open: list[tuple[Sequence, DraftTree]] = []

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps no state."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        depths = [min(self.budget.num_draft_tokens, budget.num_draft_tokens) for budget in budgets]
        own = [replace(self.budget, num_draft_tokens=depth) for depth in depths]
        trees = self.inner.propose(seqs, own)
        for tree, seq, budget in zip(trees, seqs, own, strict=True):
            check_tree(tree, seq, budget)
        self._open = list(zip(seqs, trees, strict=True))
        return trees

    def deliver(self, logits: torch.Tensor) -> None:
        """Logits of all nodes of the proposed trees; of anything else when nothing is open."""
        for seq, tree in self._open:
            self.inner.observe(seq, tree, logits[: tree.num_nodes].argmax(-1).tolist())
            logits = logits[tree.num_nodes :]
        self._open = []


def runner_with(drafter: Drafter, budget: DraftBudget) -> ModelRunner:
    """A tiny runner that drafts with ``drafter`` under ``budget`` (of at most 64 draft tokens)."""
    runner = tiny_runner(
        drafter="ngram", num_draft_tokens=64, tree="chain"
    )  # room for 64 draft tokens past the committed rows
    budgeted = Budgeted(drafter, budget)
    runner.drafter = budgeted
    logits, release = runner.model.logits, runner.release

    def observed(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        budgeted.deliver(scores)
        return scores

    def released(seq: Sequence) -> None:
        drafter.finish(seq)
        release(seq)

    runner.model.logits = observed  # type: ignore[method-assign]
    runner.release = released  # type: ignore[method-assign]
    return runner


def mixed_requests() -> list[SequenceRequest]:
    """Greedy, sampled, penalised; some stop on tokens that drafts contain."""
    length: Asked = {"max_tokens": 40}
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"frequency_penalty": 0.8},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (5, 9, 11, 21, 33)},
        {"max_tokens": 2},
    ]
    return [tiny_request(index=i, **(length | extra)) for i, extra in enumerate(extras)]


def outcomes(runner: ModelRunner, *, batch: int = 3) -> list[Completed]:
    """What the runner answers to the mixed requests."""
    done = ColocatedEngine(runner, max_running=batch).generate(mixed_requests())
    assert runner.allocator.check_integrity() == []
    return done


def assert_same_text(drafter: Drafter, budget: DraftBudget, plain: Seq[Completed]) -> int:
    """Token equality with plain decoding, twice (the second time with what was learnt). Returns accepted tokens."""
    runner = runner_with(drafter, budget)
    accepted = 0
    for _ in range(2):
        for got, expected in zip(outcomes(runner), plain, strict=True):
            assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason)
            accepted += got.stats.accepted_tokens
    return accepted
