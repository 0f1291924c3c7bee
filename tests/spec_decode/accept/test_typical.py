"""Typical acceptance by worked cases (algorithms.md C3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from paceline.request import FinishReason
from paceline.spec_decode.accept.acceptance import Verification, typical
from paceline.spec_decode.accept.coins import Coins
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.trees.tree import DraftTree, build_tree

STOP = 5
V = 6
FLAT = [1 / 6] * 6
ROOT_POSITION = 3


@dataclass
class Rows:
    """Laws by the token of the node; a node without one must not be asked."""

    tree: DraftTree
    laws: dict[int, list[float]]
    asked: list[int] = field(default_factory=list)

    def sample(self, node: int) -> int:
        raise AssertionError("typical acceptance draws with coins")

    def probs(self, node: int) -> torch.Tensor:
        assert node not in self.asked
        self.asked.append(node)
        return torch.tensor(self.laws[self.tree.token_ids[node]], dtype=torch.float64)


def verdict(pairs: list[tuple[int, int]], laws: dict[int, list[float]], budget: int = 9, seed: int = 0) -> Verdict:
    tree = build_tree(0, pairs, V, 16, 8)
    return typical(
        Verification(tree, Rows(tree, laws), Coins(seed), ROOT_POSITION, lambda token: token == STOP, budget)
    )


def certain(token: int) -> list[float]:
    return [float(i == token) for i in range(V)]


@pytest.mark.parametrize(
    ("law", "threshold", "accepted"),
    [
        ([0.35, 0.25, 0.2, 0.085, 0.085, 0.03], 0.3 * math.exp(-1.5606), {0, 1, 2, 3, 4}),  # 0.063
        ([0.8, 0.085, 0.1, 0.015, 0.0, 0.0], 0.09, {0, 2}),  # low entropy: epsilon is the smaller term
    ],
)
def test_the_threshold(law: list[float], threshold: float, accepted: set[int]) -> None:
    entropy = -sum(p * math.log(p) for p in law if p > 0)
    assert min(0.09, 0.3 * math.exp(-entropy)) == pytest.approx(threshold, rel=1e-3)
    tree = [build_tree(0, [(-1, token)], V, 2, 1) for token in range(V)]
    laws = {token: law if token == 0 else certain(0) for token in range(V)}
    asked = [Verification(t, Rows(t, laws), Coins(0), ROOT_POSITION, lambda _: False, 9) for t in tree[1:]]
    taken = [typical(verification).path == (1,) for verification in asked]
    assert {token for token, was in enumerate(taken, start=1) if was} == accepted - {0}


def test_exactly_at_the_threshold_is_rejected() -> None:
    at = [0.91, 0.09, 0.0, 0.0, 0.0, 0.0]  # entropy .30: .3 * exp(-.30) = .22, so epsilon decides
    assert verdict([(-1, 1)], {0: at}).path == ()
    above = [0.909, 0.091, 0.0, 0.0, 0.0, 0.0]
    assert verdict([(-1, 1)], {0: above, 1: certain(2)}) == Verdict((1,), 2)


def test_the_longest_path_wins_over_a_likelier_one() -> None:
    """0 -> 1 (.7) with nothing after it; 0 -> 2 (.3) -> 3."""
    laws = {0: [0.0, 0.7, 0.3, 0.0, 0.0, 0.0], 1: certain(4), 2: certain(3), 3: certain(1)}
    assert verdict([(-1, 1), (-1, 2), (0, 2), (1, 3)], laws) == Verdict((2, 4), 1)


def test_of_equally_long_paths_the_likeliest_wins_then_the_lowest() -> None:
    laws = {0: [0.0, 0.6, 0.4, 0.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0, 0.5, 0.5, 0.0], 2: certain(3), 3: certain(0)}
    assert verdict([(-1, 1), (-1, 2), (0, 3), (1, 3)], laws).path == (2, 4)  # .6 * .5 < .4 * 1
    laws = {**laws, 0: [0.0, 0.9, 0.1, 0.0, 0.0, 0.0]}
    assert verdict([(-1, 1), (-1, 2), (0, 3), (1, 3)], laws).path == (1, 3)  # .9 * .5 > .1 * 1
    even = {0: [0.0, 0.5, 0.5, 0.0, 0.0, 0.0], 1: certain(0), 2: certain(0)}
    assert verdict([(-1, 2), (-1, 1)], even).path == (1,)


def test_a_child_of_a_rejected_node_is_out_of_reach() -> None:
    assert verdict([(-1, 1), (0, 2)], {0: certain(3)}) == Verdict((), 3)


def test_an_accepted_stop_token_ends_the_path_and_is_not_descended_into() -> None:
    laws = {0: certain(1), 1: certain(STOP)}
    assert verdict([(-1, 1), (0, STOP), (1, 2)], laws) == Verdict((1,), STOP, FinishReason.STOP)


def test_a_drawn_stop_token_ends_the_sequence() -> None:
    assert verdict([], {0: certain(STOP)}) == Verdict((), STOP, FinishReason.STOP)
    assert verdict([], {0: certain(STOP)}, budget=1) == Verdict((), STOP, FinishReason.STOP)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_budget_cuts_the_path(budget: int) -> None:
    laws = {0: certain(1), 1: certain(2), 2: certain(3), 3: certain(4)}
    path = tuple(range(1, budget))
    assert verdict([(-1, 1), (0, 2), (1, 3)], laws, budget) == Verdict(path, budget, FinishReason.LENGTH)


def test_the_new_token_is_drawn_at_its_own_position() -> None:
    laws = {0: certain(1), 1: FLAT}
    flat = torch.tensor(FLAT, dtype=torch.float64)
    for seed in range(20):
        expected = Coins(seed).pick(flat, ROOT_POSITION + 2, 0)
        assert verdict([(-1, 1)], laws, seed=seed).new_token == expected
