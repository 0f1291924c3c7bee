"""The walk of a batch on the device against ``verify.walk``: torch here, the Triton kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import FinishReason
from paceline.spec_decode.accept.device_trees import FINISH, LENGTH, NEW_TOKEN, PATH, upload_trees
from paceline.spec_decode.accept.device_walk import read_verdicts, walk_device
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.device_walk import check_walks
from tests.support.interpreter import INTERPRETED, Again

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROOT = DraftTree((3,), (-1,), (0,))
CHAIN = build_tree(0, [(-1, 1), (0, 2), (1, 3)], vocab_size=10, max_nodes=4, max_depth=3)


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@given(seed=st.integers(0, 2**32), num_trees=st.integers(1, 12))
@settings(max_examples=10 if INTERPRETED else 80, deadline=None, derandomize=True)
def test_walks_of_random_trees(seed: int, num_trees: int) -> None:
    check_walks(CPU, num_trees, seed)


def test_random_walks_reach_every_end() -> None:
    verdicts = [verdict for seed in range(10) for verdict in check_walks(CPU, 12, seed)]
    assert {verdict.finish_reason for verdict in verdicts} == {None, FinishReason.STOP, FinishReason.LENGTH}
    assert max(len(verdict.path) for verdict in verdicts) >= 4
    assert any(verdict.new_token == -1 for verdict in verdicts)


def test_roots_alone_are_a_plain_decode_step() -> None:
    trees = upload_trees([ROOT, ROOT], [(), ()], [5, 1], CPU)
    verdicts = read_verdicts(walk_device(trees, torch.tensor([4, 8])))
    assert verdicts == [Verdict((), 4), Verdict((), 8, FinishReason.LENGTH)]


def test_columns_of_a_result() -> None:
    trees = upload_trees([CHAIN], [(9,)], [50], CPU)
    row = walk_device(trees, torch.tensor([1, 2, 9, 3]))[0].tolist()
    assert (row[LENGTH], row[NEW_TOKEN], row[FINISH], row[PATH : PATH + 2]) == (2, 9, 1, [1, 2])


def test_a_token_that_could_not_be_sampled_ends_the_walk_that_reaches_it() -> None:
    trees = upload_trees([CHAIN, CHAIN], [(), ()], [50, 50], CPU)
    verdicts = read_verdicts(walk_device(trees, torch.tensor([1, -1, 3, 3, 7, -1, -1, -1])))
    assert verdicts == [Verdict((1,), -1), Verdict((), 7)]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        upload_trees([ROOT], [()], [0], CPU)
