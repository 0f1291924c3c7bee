"""Sums that do not depend on how many ranks add them.

A row-parallel product cuts its inner dimension into a model's number of slabs. Each slab is a float32 sum of its own,
and the slabs are added in one binary tree. The slabs of a rank are a whole branch of that tree, so that the tree over
the ranks' sums is the tree over all slabs, whatever the degree is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import Protocol, TypeVar

MOST_SLABS = 8  # of a model; kernels/blocks.h keeps as many open sums as their tree needs
SLAB_MULTIPLE = 32  # elements of the inner dimension that a kernel takes together


class Addend(Protocol):
    """A number, or a tensor of numbers."""

    def __add__(self: T, other: T, /) -> T: ...


T = TypeVar("T", bound=Addend)


def sum_slabs(num_heads: int) -> int:
    """Slabs of a model's row-parallel products: the powers of two up to 8 that divide the number of query heads, or for
    an odd number its largest divisor up to 8. A degree divides the slabs, so that every rank has whole heads.

    Raises ValueError for fewer than one head.
    """
    if num_heads < 1:
        raise ValueError(f"{num_heads} heads: a model has at least 1")
    if (power := gcd(num_heads, MOST_SLABS)) > 1:
        return power
    return max(slabs for slabs in range(1, MOST_SLABS + 1) if num_heads % slabs == 0)


def slabs_of(in_features: int, slabs: int, group: int = 1) -> int:
    """Slabs of one product of a model that has ``slabs``: as many, or 1 where its inner dimension cannot be cut into
    equal runs of a multiple of 32 elements and of whole groups. A model with such a product runs at degree 1 alone.

    group: elements that stay together, see QuantizedWeight.kept_together.
    """
    return 1 if in_features % (lcm(SLAB_MULTIPLE, group) * slabs) else slabs


def split(count: int) -> int:
    """How many of ``count`` > 1 neighbouring slabs the left branch of their tree has."""
    return (count + 1) // 2


def tree_sum(parts: Sequence[T]) -> T:
    """The sum of neighbouring parts, first to last, in the order of the tree: the left branch and the right branch are
    added to themselves first. Raises ValueError for no part."""
    if not parts:
        raise ValueError("no parts: a sum has at least 1")
    if len(parts) == 1:
        return parts[0]
    middle = split(len(parts))
    return tree_sum(parts[:middle]) + tree_sum(parts[middle:])
