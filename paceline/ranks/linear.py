"""Row-parallel products: each rank has some columns of a weight, and rank 0 puts the sum together."""

from __future__ import annotations

import torch

from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.parallel.slabs import tree_sum
from paceline.ranks.group import Group


class RowParallelLinear(Linear):
    """y = sum over ranks of x_r W_r^T, + b. Each rank's sum is a float32 branch of the model's tree of slabs. Rank 0
    adds the branches in the tree's order, casts once at the end and tells the others, or every rank does it alike. With
    ``first_only`` rank 0 goes on with the float32 sum itself."""

    whole = False

    def __init__(
        self, weight: LinearWeight, bias: torch.Tensor | None, slabs: int, group: Group, first_only: bool = False
    ) -> None:
        """weight: this rank's columns, [out_features, in_features / degree]; bias: the whole one; slabs: of this
        rank's columns."""
        super().__init__(weight, None, out_float32=True, slabs=slabs)
        self._group, self._first_only = group, first_only
        self._added = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features / degree], this rank's -> [T, out_features] in x's dtype, the same on every rank; with
        ``first_only`` float32, and on other ranks than 0 only their own branch."""
        branch = super().__call__(x)
        if self._first_only:
            branches = self._group.gather(branch)
            return branch if branches is None else self._sum(branches)
        told = x.new_empty(x.shape[0], self.out_features)
        return self._group.made(branch, lambda branches: self._sum(branches).to(x.dtype), told)

    def _sum(self, branches: torch.Tensor) -> torch.Tensor:
        """branches: float32 [degree, T, out_features]."""
        y = tree_sum(branches.unbind(0))
        return y if self._added is None else y + self._added
