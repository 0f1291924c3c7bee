"""Products whose inner dimension ranks of a node share: attention's output and the second matrix of an MLP."""

from __future__ import annotations

import torch

from paceline.layers.linear import Linear, group_of
from paceline.layers.quantized import LinearWeight
from paceline.parallel.slabs import slabs_of


def row_parallel(
    weight: LinearWeight, slabs: int, bias: torch.Tensor | None = None, out_float32: bool = False
) -> Linear:
    """slabs: of the model (``ModelSpec.sum_slabs``); the product has one where they do not fit its inner dimension."""
    return Linear(weight, bias, out_float32, slabs_of(weight.shape[1], slabs, group_of(weight)))
