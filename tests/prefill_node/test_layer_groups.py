"""Which layers of a chunk leave together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.transports.base import MESSAGE_BYTES
from prefill_node.groups import MIN_BYTES, layer_groups

KIB = 1024


def test_the_last_group_is_small_and_the_others_large() -> None:
    """SmolLM2-135M: 30 layers of 768 bytes a token, 256 tokens."""
    assert layer_groups([256 * 768] * 30) == (range(0, 7), range(7, 28), range(28, 30))


def test_what_is_too_little_for_a_message_leaves_with_its_neighbours() -> None:
    assert layer_groups([KIB] * 30) == (range(0, 30),)
    assert layer_groups([100 * KIB, 300 * KIB, 300 * KIB]) == (range(0, 2), range(2, 3))
    assert layer_groups([]) == ()


def test_a_layer_of_more_than_a_message_is_a_group() -> None:
    assert layer_groups([2 * MESSAGE_BYTES] * 3, first_layer=5) == (range(5, 6), range(6, 7), range(7, 8))


def test_layers_that_do_not_cross_go_with_others() -> None:
    assert layer_groups([0, 0, 300 * KIB, 0, 300 * KIB, 0]) == (range(0, 4), range(4, 6))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * MESSAGE_BYTES), max_size=40), st.integers(0, 5))
def test_groups_follow_one_another_and_none_is_too_small(sizes: list[int], first: int) -> None:
    groups = layer_groups(sizes, first)
    assert [layer for group in groups for layer in group] == list(range(first, first + len(sizes)))
    totals = [sum(sizes[layer - first] for layer in group) for group in groups]
    if sum(sizes) >= MIN_BYTES:
        assert min(totals) >= MIN_BYTES
    for group, total in zip(groups, totals, strict=True):
        largest = max(sizes[layer - first] for layer in group)
        assert total < MESSAGE_BYTES + 2 * MIN_BYTES or total - largest < 2 * MIN_BYTES
    if len(groups) > 1 and len(groups[-1]) > 1:
        assert totals[-1] - sizes[groups[-1][0] - first] < MIN_BYTES
