"""Trees of Medusa's candidates: products, cuts, confidence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import product
from typing import Unpack

import pytest
import torch

from paceline.errors import ConfigError
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.medusa import MedusaDrafter
from paceline.spec_decode.sequence import DraftState
from paceline.spec_decode.trees.static_trees import RankPath
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Sampling
from tests.support.medusa_drafting import (
    BUDGETS,
    GREEDY,
    HIDDEN,
    PROMPT,
    SAMPLED,
    drafter_of,
    make,
    prefill,
)
from tests.support.tiny_model import tiny_request


def state_of(ids: list[list[int]], probs: list[list[float]] | None = None) -> DraftState:
    shape = torch.tensor(ids)
    chances = torch.tensor(probs) if probs is not None else torch.full(shape.shape, 0.1)
    return DraftState(shape, chances.float(), torch.zeros(1, HIDDEN))


def tree_of(
    state: DraftState,
    budget: DraftBudget,
    choices: Seq[RankPath] | None = None,
    width: int = 4,
    **params: Unpack[Sampling],
) -> DraftTree:
    """The tree that a sequence with ``state`` gets."""
    runner = make(width=width, sampling=GREEDY, choices=choices)
    seq = runner.new_sequence(tiny_request(PROMPT, **params))
    seq.token_ids.append(77)
    seq.draft = state
    drafter = drafter_of(runner)
    return MedusaDrafter.propose(drafter, [seq], [budget])[0]


def test_worked_mask_of_the_cartesian_product() -> None:
    """C3: two tokens of head 0, three of head 1: 8 nodes and the root, 6 paths."""
    choices = [(0,), (1,), *product(range(2), range(3))]
    state = state_of([[10, 11, 12], [20, 21, 22]])
    tree = tree_of(state, DraftBudget(2, 3, tree_nodes=8), choices, width=3)
    assert tree.token_ids == (77, 10, 11, 20, 21, 22, 20, 21, 22)
    sees = [[int(other in tree.path(node)) for other in range(9)] for node in range(9)]
    assert sees == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 0, 0, 0, 1],
    ]
    leaves = [node for node in range(9) if node not in tree.parents]
    paths = {tuple(tree.token_ids[n] for n in tree.path(leaf)[1:]) for leaf in leaves}
    assert paths == set(product((10, 11), (20, 21, 22)))
    assert tree.draft_probs is None


@pytest.mark.parametrize("nodes", [1, 4, 9, 16])
def test_a_dynamic_tree_is_the_best_of_the_product(nodes: int) -> None:
    probs = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.9, 0.04, 0.01]]
    state = state_of([[10, 11, 12], [20, 21, 22], [30, 31, 32]], probs)
    tree = tree_of(state, DraftBudget(3, 3, TreeKind.DYNAMIC, nodes), temperature=0.0)
    value: dict[tuple[int, ...], float] = {}
    for depth in (1, 2, 3):
        for ranks in product(range(3), repeat=depth):
            chance = 1.0
            for level, rank in enumerate(ranks):
                chance *= probs[level][rank]
            value[tuple(10 * (level + 1) + rank for level, rank in enumerate(ranks))] = chance
    found = sorted(tuple(tree.token_ids[n] for n in tree.path(node)[1:]) for node in range(1, tree.num_nodes))
    best = sorted(value, key=lambda path: (-value[path], len(path), path))[:nodes]
    assert found == sorted(best)


def test_the_default_tree_is_cut_to_the_budget() -> None:
    state = state_of([[10 * (d + 1) + r for r in range(4)] for d in range(4)])
    whole = tree_of(state, DraftBudget(4, 4, tree_nodes=64))
    assert 15 <= whole.num_draft_tokens <= 26
    assert max(whole.depths) == 4
    for budget in (DraftBudget(4, 4, tree_nodes=6), DraftBudget(2, 4, tree_nodes=64), DraftBudget(4, 2, tree_nodes=9)):
        tree = tree_of(state, budget)
        paths = {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(tree.num_nodes)}
        assert paths < {tuple(whole.token_ids[n] for n in whole.path(node)) for node in range(whole.num_nodes)}
        assert 3 <= tree.num_nodes <= budget.max_nodes
        assert max(tree.depths) <= budget.num_draft_tokens
        assert all(token % 10 < budget.tree_width for token in tree.token_ids[1:])


def test_drafting_stops_below_the_confidence() -> None:
    """The candidate that is unsure is still there, what rests on it is not."""
    state = state_of([[10, 11], [20, 21], [30, 31]], [[0.9, 0.1], [0.3, 0.2], [0.9, 0.1]])
    for kind in TreeKind:
        depths = {
            least: max(tree_of(state, DraftBudget(3, 2, kind, 14, least), temperature=0.0).depths)
            for least in (0.0, 0.2, 0.5, 0.95)
        }
        assert depths == {0.0: 3, 0.2: 3, 0.5: 2, 0.95: 1}


def test_sampled_chains_stop_where_the_law_is_unsure() -> None:
    """B7: not where what was drawn from it is unlikely."""
    runner = make("chain", SAMPLED)
    lengths = set()
    for index in range(12):
        seq = prefill(runner, [*PROMPT, index + 20], temperature=1.0)
        assert seq.draft is not None
        logits = drafter_of(runner).heads.logits(seq.draft.hidden)[:, 0]
        sure = (torch.softmax(logits, -1).amax(-1) >= 0.3).tolist()
        expected = 1 + sure.index(False) if False in sure else 4
        tree = MedusaDrafter.propose(drafter_of(runner), [seq], [DraftBudget(4, 1, min_confidence=0.3)])[0]
        assert tree.num_draft_tokens == expected
        lengths.add(expected)
    assert len(lengths) > 1


def test_without_state_there_is_the_root_alone() -> None:
    runner = make("static")
    seq = prefill(runner, PROMPT)
    seq.draft = None
    assert drafter_of(runner).propose([seq], [DraftBudget(4, 4)])[0].num_nodes == 1
    assert drafter_of(runner).draft_slots(BUDGETS["dynamic"]) == 0


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="tree_width"):
        make(sampling=SAMPLED, width=2)
    with pytest.raises(ConfigError, match="needs 3 candidates"):
        make(width=2, choices=[(0,), (1,), (2,)])
    with pytest.raises(ConfigError, match="before its parent"):
        make(choices=[(0, 0), (0,)])
    make(width=2)  # the default tree is cut to the width
