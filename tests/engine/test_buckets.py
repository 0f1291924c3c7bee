"""Which shapes are captured, which one a batch runs in, and what captures may cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.buckets import (
    FREE_ROWS,
    MAX_PADDING,
    Bucket,
    MemoryBound,
    all_buckets,
    batch_sizes,
    choose,
    row_counts,
)


def test_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert batch_sizes(50) == (1, 2, 4, 8, 16, 24, 32, 48, 50)
    assert row_counts(5, varies=False) == (1, 5)
    assert row_counts(16, varies=True) == (1, 2, 4, 8, 16)
    assert row_counts(1, varies=True) == (1,)


def test_largest_first() -> None:
    buckets = all_buckets(8, 5, varies=False)
    assert len(buckets) == len(set(buckets)) == 4 * 2
    assert buckets[0] == Bucket(8, 5)
    assert [b.num_rows for b in buckets] == sorted((b.num_rows for b in buckets), reverse=True)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    most=st.integers(1, 40),
    rows=st.integers(1, 9),
    varies=st.booleans(),
)
def test_the_choice_holds_the_batch_and_wastes_little(counts: list[int], most: int, rows: int, varies: bool) -> None:
    buckets = all_buckets(most, rows, varies)
    best = choose(buckets, counts)
    holding = [b for b in buckets if b.requests >= len(counts) and b.rows >= max(counts)]
    if best is None:
        assert all(b.num_rows > max(FREE_ROWS, MAX_PADDING * sum(counts)) for b in holding)
    else:
        assert best in holding
        assert best.num_rows == min(b.num_rows for b in holding)


def test_one_long_tree_among_many_short_is_not_padded() -> None:
    assert choose(all_buckets(32, 64, varies=False), [64] + [1] * 31) is None
    assert choose(all_buckets(32, 64, varies=False), [64] * 32) == Bucket(32, 64)
    assert choose([], [1]) is None


@pytest.mark.parametrize(
    ("limit", "each", "captures"), [(100, 30, 3), (100, 25, 4), (0, 1, 1), (10**9, 1, 8), (100, 0, 8)]
)
def test_memory_bound(limit: int, each: int, captures: int) -> None:
    """What the last one took must fit once more; the first is tried whatever comes of it."""
    bound, done = MemoryBound(limit), 0
    while done < 8 and bound.allows_next():
        bound.took(each)
        done += 1
    assert done == captures


def test_memory_given_back_meanwhile_counts_for_nothing() -> None:
    bound = MemoryBound(10)
    bound.took(-5)
    assert (bound.spent, bound.last) == (0, 0)
