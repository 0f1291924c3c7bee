"""The walk: where it goes, where it stops, what it commits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import FinishReason
from paceline.spec_decode.accept.verify import Verdict, walk
from paceline.spec_decode.trees.tree import DraftTree, build_tree

EOS = 9
#  0 -> 1 -> 3 -> EOS -> 5
#    -> 2 -> 4
TREE = build_tree(0, [(-1, 1), (-1, 2), (0, 3), (1, 4), (2, EOS), (4, 5)], vocab_size=10, max_nodes=16, max_depth=8)


def is_eos(token: int) -> bool:
    return token == EOS


def never(token: int) -> bool:
    return False


def samples(tree: DraftTree, tokens: dict[int, int]) -> list[int]:
    """One sample per node, 7 (no child anywhere) unless named."""
    return [tokens.get(node, 7) for node in range(tree.num_nodes)]


def test_no_child_matches() -> None:
    verdict = walk(TREE, samples(TREE, {}), is_eos, 10)
    assert verdict == Verdict((), 7)
    assert verdict.committed(TREE) == [7]
    assert not verdict.finish


def test_descends_the_branch_that_was_sampled() -> None:
    verdict = walk(TREE, samples(TREE, {0: 2, 2: 4, 4: 8}), is_eos, 10)
    assert verdict == Verdict((2, 4), 8)
    assert verdict.committed(TREE) == [2, 4, 8]


def test_a_token_of_another_branch_is_no_child() -> None:
    assert walk(TREE, samples(TREE, {0: 1, 1: 4}), is_eos, 10) == Verdict((1,), 4)


def test_a_leaf_gives_the_bonus() -> None:
    chain = build_tree(0, [(-1, 1), (0, 2)], vocab_size=10, max_nodes=3, max_depth=2)
    assert walk(chain, [1, 2, 6], is_eos, 10).committed(chain) == [1, 2, 6]


def test_a_drafted_stop_token_ends_the_walk_as_the_new_token() -> None:
    """Its node is not part of the path: no KV row of it is kept, and nothing after it is committed."""
    verdict = walk(TREE, samples(TREE, {0: 1, 1: 3, 3: EOS, 5: 5}), is_eos, 10)
    assert verdict == Verdict((1, 3), EOS, FinishReason.STOP)
    assert verdict.committed(TREE) == [1, 3, EOS]
    assert verdict.finish


def test_an_ignored_stop_token_is_a_token() -> None:
    verdict = walk(TREE, samples(TREE, {0: 1, 1: 3, 3: EOS, 5: 5}), never, 10)
    assert verdict.committed(TREE) == [1, 3, EOS, 5, 7]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_budget_cuts(limit: int) -> None:
    verdict = walk(TREE, samples(TREE, {0: 1, 1: 3, 3: EOS}), never, limit)
    assert verdict.committed(TREE) == [1, 3, EOS][:limit]
    assert verdict.finish_reason == FinishReason.LENGTH


def test_a_stop_token_at_the_budget_is_a_stop() -> None:
    assert walk(TREE, samples(TREE, {0: EOS}), is_eos, 1).finish_reason == FinishReason.STOP


def test_a_function_is_asked_for_reached_nodes_alone_and_once() -> None:
    asked: list[int] = []

    def sample(node: int) -> int:
        asked.append(node)
        return {0: 2, 2: 4}.get(node, 7)

    assert walk(TREE, sample, is_eos, 10) == Verdict((2, 4), 7)
    assert asked == [0, 2, 4]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        walk(TREE, samples(TREE, {}), is_eos, 0)


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    """At least one token, within the budget, along one path, each accepted token equal to its parent's sample."""
    pairs = [
        (data.draw(st.integers(-1, i - 1)), data.draw(st.integers(0, 3))) for i in range(data.draw(st.integers(0, 12)))
    ]
    tree = build_tree(0, pairs, vocab_size=4, max_nodes=13, max_depth=6)
    sampled = data.draw(st.lists(st.integers(0, 4), min_size=tree.num_nodes, max_size=tree.num_nodes))
    limit = data.draw(st.integers(1, 8))
    verdict = walk(tree, sampled, lambda token: token == 3, limit)
    tokens = verdict.committed(tree)
    assert 1 <= len(tokens) <= limit
    nodes = [0, *verdict.path]
    assert tree.path(nodes[-1]) == nodes
    assert tokens == [sampled[node] for node in nodes]
    assert 3 not in tokens[:-1]
    assert (verdict.finish_reason == FinishReason.STOP) == (tokens[-1] == 3)
    if not verdict.finish:
        assert tree.child(nodes[-1], tokens[-1]) is None
