"""Drafts of what a request predicts: where they come from, and that they change no token and no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import InvalidRequest
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from paceline.serving.validate import check_request
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.prediction import predicted_tree
from paceline.spec_decode.sequence import Sequence
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

PREDICTED = (10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
BUDGET = DraftBudget(4)


def drafts(output: list[int], predicted: tuple[int, ...] = PREDICTED, budget: DraftBudget = BUDGET) -> tuple[int, ...]:
    """What is drafted after ``output``, which came in two rounds."""
    seq = predicting(predicted)
    for end in (len(output) // 2, len(output)):
        seq.token_ids = [1, 2, 3, *output[:end]]
        tree = predicted_tree(seq, budget)
    return () if tree is None else tree.token_ids[1:]


def predicting(predicted: tuple[int, ...]) -> Sequence:
    asked = SequenceRequest(
        "r", (1, 2, 3), SamplingParams(seed=1), speculation=SpeculationParams(prediction_token_ids=predicted)
    )
    return Sequence.start(asked, PageTable(PageAllocator(1), 4))


@pytest.mark.parametrize(
    ("output", "drafted"),
    [
        ([10], (11, 12, 13, 14)),
        ([10, 11, 12, 13, 14, 15, 16], (17, 18, 19)),
        ([*PREDICTED], ()),
        ([10, 11, 99], ()),  # it left the prediction
        ([10, 11, 99, 13], ()),  # one token agrees by chance
        ([10, 11, 99, 13, 14], (15, 16, 17, 18)),  # it came back
        ([10, 11, 99, 13, 14, 15, 16], (17, 18, 19)),
        ([98, 99, 10, 11], (12, 13, 14, 15)),  # something stands before what was predicted
        ([17, 18], (19,)),
        ([99, 98], ()),
    ],
)
def test_the_answer_is_followed_through_the_prediction(output: list[int], drafted: tuple[int, ...]) -> None:
    """Mutants: the place is not moved on; a single equal token counts; the search begins at the start."""
    assert drafts(output) == drafted


def test_of_two_places_the_next_one_is_taken() -> None:
    """A line that stands twice: after the first one, the second is meant."""
    twice = (5, 6, 7, 20, 8, 9, 5, 6, 7, 21)
    assert drafts([5, 6, 7, 20, 99, 5, 6, 7], twice)[0] == 21
    assert drafts([5, 6, 7, 20, 8, 9, 5, 6, 7, 21, 99, 8, 9], twice)[0] == 5  # none further on: the last one before


@pytest.mark.parametrize("ids", [(-1,), (VOCAB,), (1,) * 513])
def test_a_node_refuses_what_no_prediction_is(ids: tuple[int, ...]) -> None:
    """Routers check it too, and a node does not rely on that. Mutant: ids of predictions are not looked at."""
    runner = tiny_runner("bf16", drafter="none", max_model_len=512)
    request = replace(tiny_request(index=0), speculation=SpeculationParams(prediction_token_ids=ids))
    with pytest.raises(InvalidRequest, match="prediction_token_ids"):
        check_request(runner, request, 64)


def test_a_budget_of_nothing_drafts_nothing() -> None:
    assert drafts([10], budget=DraftBudget(0)) == ()


@needs_kernels
@pytest.mark.parametrize("options", [{"drafter": "mtp"}, {"drafter": "auto"}, {"drafter": "mtp", "tree": "static"}])
def test_no_token_and_no_bit_changes(options: dict[str, object]) -> None:
    """A prediction that is right, one that is right in part, one that is wrong; and right ones save rounds."""
    asked = [tiny_request(index=i, temperature=t, max_tokens=24) for i, t in enumerate((0.0, 1.0, 0.0, 0.7))]
    plain = run(tiny_runner("bf16", drafter="none"), asked)
    predicted = [tuple(plain[i].token_ids) for i in range(3)] + [(7, 7, 7, 7)]
    predicted[1] = (*predicted[1][:8], 3, 3, *predicted[1][10:])
    with_them = [
        replace(request, speculation=SpeculationParams(prediction_token_ids=ids))
        for request, ids in zip(asked, predicted, strict=True)
    ]
    for batch in (1, 4):
        runner = tiny_runner("bf16", num_draft_tokens=6, **options)
        got = run(runner, with_them, batch=batch)
        assert [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in plain]
        rounds = [len(o.accepted_per_round) for o in got]
        assert rounds[0] == rounds[2] == -(-23 // 7)  # the first token is prefill's
        assert rounds[1] < 12
