"""Slabs of a model, and the tree that adds them."""

from __future__ import annotations

import pytest

from paceline.parallel.slabs import slabs_of, sum_slabs, tree_sum


class Term(str):
    """A sum that shows how it was made."""

    def __add__(self, other: str) -> Term:
        return Term(f"({self}{other})")


def terms(count: int) -> list[Term]:
    return [Term(i) for i in range(count)]


@pytest.mark.parametrize(
    ("num_heads", "slabs"),
    [(1, 1), (2, 2), (4, 4), (7, 7), (9, 3), (11, 1), (12, 4), (14, 2), (15, 5), (16, 8), (32, 8), (64, 8)],
)
def test_slabs_of_a_model(num_heads: int, slabs: int) -> None:
    assert sum_slabs(num_heads) == slabs


def test_a_product_that_cannot_be_cut_has_one_slab() -> None:
    assert [slabs_of(size, 8) for size in (256, 4096, 14336, 255, 128, 320)] == [8, 8, 8, 1, 1, 1]
    assert [slabs_of(size, 3) for size in (576, 1536, 96, 64)] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("slabs", "order"),
    [(1, "0"), (3, "((01)2)"), (5, "(((01)2)(34))"), (7, "(((01)(23))((45)6))"), (8, "(((01)(23))((45)(67)))")],
)
def test_order_of_the_tree(slabs: int, order: str) -> None:
    """Mutant: a sum from left to right."""
    assert tree_sum(terms(slabs)) == order


def test_branches_of_ranks_are_the_tree_of_all() -> None:
    """For every number of slabs that a model can have, and every degree that divides it."""
    for slabs in sorted({sum_slabs(num_heads) for num_heads in range(1, 257)}):
        parts = terms(slabs)
        for degree in (t for t in range(1, slabs + 1) if slabs % t == 0):
            own = slabs // degree
            roots = [tree_sum(parts[rank * own : (rank + 1) * own]) for rank in range(degree)]
            assert tree_sum(roots) == tree_sum(parts)


def test_nothing_cannot_be_summed() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        tree_sum([])
    with pytest.raises(ValueError, match="at least 1"):
        sum_slabs(0)
