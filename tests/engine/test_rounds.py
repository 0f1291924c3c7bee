"""A decode round by either judge: what it leaves in the pool, and what the drafter is told, when the accepted path lies
off the tree's spine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk, RoundResult
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.length.adaptive import FixedLength
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

torch.set_num_threads(1)

DEPTH, TOKENS = 3, 14
REQUESTS = [tiny_request(index=i, max_tokens=TOKENS, temperature=t) for i, t in enumerate((0.0, 0.0, 0.9))]


class Beside(Drafter):
    """Knows the answers, and drafts a wrong token before each right one: nodes 2, 4, 6 are accepted."""

    name, needs_argmax, needs_extend = "beside", True, True

    def __init__(self, answers: Mapping[str, Seq[int]]) -> None:
        self.answers = answers
        self.told: list[tuple[str, int, list[int]]] = []  # request, output tokens so far, best token at each node
        self.digested: list[tuple[str, int, int, torch.Tensor]] = []  # request, first row, end, rows

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            coming = self.answers[seq.request.request_id][seq.num_output :][: budget.num_draft_tokens]
            pairs, parent = [], -1
            for token in coming:
                pairs += [(parent, (token + 1) % VOCAB), (parent, token)]
                parent = len(pairs) - 1
            trees.append(build_tree(seq.token_ids[-1], pairs, VOCAB, budget.max_nodes, DEPTH))
        return trees

    def extend(self, items: Seq[ExtendItem]) -> None:
        self.digested += [(i.seq.request.request_id, i.start, i.end, i.hidden.clone()) for i in items]

    def observe(self, seq: Sequence, tree: DraftTree, argmax: Seq[int]) -> None:
        self.told.append((seq.request.request_id, seq.num_output, list(argmax)))


def plain_answers() -> dict[str, list[int]]:
    done = ColocatedEngine(tiny_runner(drafter="none", num_draft_tokens=0)).generate(REQUESTS)
    return {request.request_id: answer.token_ids for request, answer in zip(REQUESTS, done, strict=True)}


def drafting(runner: ModelRunner, rounds: int) -> tuple[list[Sequence], list[list[RoundResult]]]:
    """All requests prefilled together, then so many rounds."""
    seqs = [runner.new_sequence(request) for request in REQUESTS]
    for seq in seqs:
        seq.table.ensure(seq.num_prefill + TOKENS + runner.spec_slots)
    runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
    return seqs, [runner.decode(seqs) for _ in range(rounds)]


def target_rows(runner: ModelRunner, seq: Sequence) -> torch.Tensor:
    return runner.kv.gather(runner.kv.layout.layer_range(LayerOwner.TARGET), seq.table.slots[: seq.num_computed])


@needs_kernels
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_off_the_spine_are_kept(on_device: bool) -> None:
    """Rows of the pool are those of plain decoding, bit by bit."""
    answers = plain_answers()
    runner = tiny_runner(drafter="none", num_draft_tokens=DEPTH, tree="static", tree_width=2)
    runner.drafter, runner.samples_on_device = Beside(answers), on_device
    seqs, rounds = drafting(runner, 3)
    assert {result.round.num_accepted for results in rounds for result in results} == {DEPTH}
    plain = tiny_runner(drafter="none", num_draft_tokens=0)
    expected, _ = drafting(plain, 3 * (DEPTH + 1))
    for seq, other in zip(seqs, expected, strict=True):
        assert seq.token_ids == other.token_ids
        assert torch.equal(target_rows(runner, seq), target_rows(plain, other))


@needs_kernels
@pytest.mark.parametrize("on_device", [False, True])
def test_the_drafter_is_told_of_every_tree(on_device: bool) -> None:
    """The target's best token at each node, before the round is committed; then the hidden rows of the path alone."""
    answers = plain_answers()
    runner = tiny_runner(drafter="none", num_draft_tokens=DEPTH, tree="static", tree_width=2)
    drafter = Beside(answers)
    runner.drafter, runner.samples_on_device = drafter, on_device
    drafting(runner, 2)
    plain = tiny_runner(drafter="none", num_draft_tokens=0)
    alone = Beside({request.request_id: () for request in REQUESTS})
    plain.drafter = alone
    drafting(plain, 2 * (DEPTH + 1))
    greedy = [request.request_id for request in REQUESTS if request.params.temperature == 0.0]
    assert [(name, output) for name, output, _ in drafter.told] == [
        (request.request_id, 1 + done) for done in (0, DEPTH + 1) for request in REQUESTS
    ]
    for name, output, argmax in drafter.told:
        assert len(argmax) == 1 + 2 * DEPTH
        if name in greedy:
            assert [argmax[node] for node in (0, 2, 4, 6)] == answers[name][output : output + DEPTH + 1]
    for request in REQUESTS:
        assert torch.equal(rows_of(drafter, request), rows_of(alone, request))


def rows_of(drafter: Beside, request: SequenceRequest) -> torch.Tensor:
    """Everything digested of a request, which comes in order and without a gap."""
    parts: list[torch.Tensor] = []
    end = 0
    for name, start, stop, rows in drafter.digested:
        if name == request.request_id:
            assert (start, len(rows)) == (end, stop - start)
            parts.append(rows)
            end = stop
    return torch.cat(parts)


class Clocked(FixedLength):
    """Keeps what it is told of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, float]] = []

    def observe(
        self, seqs: Seq[Sequence], trees: Seq[DraftTree], accepted: Seq[int], draft_s: float, verify_s: float
    ) -> None:
        self.told.append((draft_s, verify_s))


def test_the_length_policy_is_told_what_a_step_of_the_target_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: it is told what the drafter's digestion takes. ``auto`` then thinks that plain steps cost nothing."""
    runner = tiny_runner(drafter="ngram", num_draft_tokens=2)
    runner.policy = policy = Clocked()
    inner, pause = runner.forward, 0.05

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(pause)
        return inner(*args, **named)

    monkeypatch.setattr(runner, "forward", slow)
    drafting(runner, 2)
    assert len(policy.told) == 2
    assert min(verify_s for _, verify_s in policy.told) >= pause
