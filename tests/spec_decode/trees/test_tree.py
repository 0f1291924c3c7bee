"""Building trees and looking things up in them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec_decode.trees.tree import DraftTree, build_tree, comb

ROOMY = {"vocab_size": 100, "max_nodes": 64, "max_depth": 16}


def test_a_plain_step_is_a_root_alone() -> None:
    tree = build_tree(7, [], **ROOMY)
    assert tree == DraftTree((7,), (-1,), (0,))
    assert (tree.num_nodes, tree.num_draft_tokens, tree.is_chain) == (1, 0, True)
    assert tree.child(0, 7) is None
    assert tree.path(0) == [0]


def test_chain_and_branches() -> None:
    chain = build_tree(1, [(-1, 2), (0, 3), (1, 4)], **ROOMY)
    assert chain.is_chain
    assert (chain.parents, chain.depths) == ((-1, 0, 1, 2), (0, 1, 2, 3))
    branched = build_tree(1, [(-1, 2), (-1, 3), (0, 4), (1, 4)], **ROOMY)
    assert not branched.is_chain
    assert (branched.child(0, 3), branched.child(1, 4), branched.child(2, 4), branched.child(0, 4)) == (2, 3, 4, None)
    assert branched.path(4) == [0, 2, 4]


def test_duplicate_siblings_are_merged_with_their_children() -> None:
    tree = build_tree(0, [(-1, 5), (-1, 5), (0, 6), (1, 6), (1, 7)], **ROOMY)
    assert tree.token_ids == (0, 5, 6, 7)
    assert tree.parents == (-1, 0, 1, 1)


def test_tokens_outside_the_vocabulary_go_with_their_descendants() -> None:
    tree = build_tree(0, [(-1, 100), (0, 1), (-1, -1), (2, 2), (-1, 99), (4, 3)], **ROOMY)
    assert tree.token_ids == (0, 99, 3)


def test_depth_and_node_limits_hold() -> None:
    pairs = [(i - 1, i) for i in range(10)]
    assert build_tree(0, pairs, vocab_size=100, max_nodes=64, max_depth=3).depths == (0, 1, 2, 3)
    assert build_tree(0, pairs, vocab_size=100, max_nodes=4, max_depth=16).num_nodes == 4
    assert build_tree(0, pairs, vocab_size=100, max_nodes=1, max_depth=16).num_nodes == 1
    assert build_tree(0, pairs, vocab_size=100, max_nodes=64, max_depth=0).num_nodes == 1


def test_a_merge_costs_no_node() -> None:
    tree = build_tree(0, [(-1, 1), (-1, 1), (1, 2)], vocab_size=10, max_nodes=3, max_depth=4)
    assert tree.token_ids == (0, 1, 2)


def test_comb_hangs_each_row_under_the_best_of_the_row_before() -> None:
    pairs = comb([[10, 11], [20, 21, 22], [30]])
    tree = build_tree(0, pairs, **ROOMY)
    assert tree.token_ids == (0, 10, 11, 20, 21, 22, 30)
    assert tree.parents == (-1, 0, 0, 1, 1, 1, 3)
    assert build_tree(0, comb([[1], [2], [3]]), **ROOMY).is_chain


def test_comb_ends_at_an_empty_row() -> None:
    assert build_tree(0, comb([[1, 2], [], [3, 4]]), **ROOMY).token_ids == (0, 1, 2)
    assert comb([]) == []


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    """Whatever a drafter hands in: parents first, depths right, siblings distinct, limits kept (algorithms.md D1)."""
    count = data.draw(st.integers(0, 30))
    pairs = [(data.draw(st.integers(-3, i + 1)), data.draw(st.integers(-2, 8))) for i in range(count)]
    max_nodes, max_depth = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 5))
    tree = build_tree(3, pairs, vocab_size=7, max_nodes=max_nodes, max_depth=max_depth)
    assert (tree.token_ids[0], tree.parents[0], tree.depths[0]) == (3, -1, 0)
    assert tree.num_nodes <= max_nodes
    for i in range(1, tree.num_nodes):
        assert 0 <= tree.parents[i] < i
        assert tree.depths[i] == tree.depths[tree.parents[i]] + 1 <= max_depth
        assert 0 <= tree.token_ids[i] < 7
        assert tree.child(tree.parents[i], tree.token_ids[i]) == i  # so siblings are distinct
        assert tree.path(i)[-2:] == [tree.parents[i], i]
