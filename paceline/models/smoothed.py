"""Factors that move the range of a layer's inputs into its weights before both are rounded.

An input feature is divided by a factor and the weights that meet it are multiplied by it. What makes the feature takes
the division: the norm before, or the rows of the product before. With inputs in 8 bits this is SmoothQuant (Xiao et
al., arXiv 2211.10438), with inputs of floats the search of AWQ (Lin et al., arXiv 2306.00978). Factors here are powers
of two: in floats they change exponents alone, so the model of floats keeps every bit of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.layers.quantized_reference import round_rows

STRENGTHS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)  # of an input's range, that its factor takes away
MOST = 8  # a factor lies between 2^-MOST and 2^MOST


@dataclass(frozen=True)
class Inputs:
    """What a product saw."""

    peaks: torch.Tensor  # float32 [in_features], the largest absolute value of each feature
    rows: torch.Tensor  # float32 [n, in_features], some of them


@dataclass(frozen=True)
class Factors:
    """What a tensor of a checkpoint is multiplied by: a norm or a bias by ``rows``, a weight by both."""

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its factors, in its own dtype."""
        if self.rows is not None:
            tensor = tensor * self.rows.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)
        return tensor if self.columns is None else tensor * self.columns.to(tensor.dtype)

    @property
    def inverse(self) -> Factors:
        """What takes them away again."""
        rows, columns = (None if factors is None else 1 / factors for factors in (self.rows, self.columns))
        return Factors(rows, columns)


def best_factors(
    inputs: Inputs,
    weight: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    group: int,
    heads: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Powers of two, float32 [in_features], by which the weight's columns are multiplied: those of the strength whose
    rounded products are nearest to the products of floats, or ones.

    weight: float32 [out_features, in_features]. rounded: what its codes stand for. group: elements of an input that
    share a scale; 0: inputs are not rounded. heads: where features are those of query heads, how many share a KV head,
    and the width of one: they have its factors.
    """
    exact = inputs.rows @ weight.t()

    def error(factors: torch.Tensor) -> float:
        seen = inputs.rows / factors
        if group:
            codes, scales = round_rows(seen, group)
            seen = (codes * scales.unsqueeze(2)).flatten(1)[:, : seen.shape[1]]
        return float((seen @ rounded(weight * factors).t() - exact).square().sum())

    ranges, sizes = (_of_kv_heads(x, heads) for x in (inputs.peaks, weight.abs().amax(dim=0)))
    found = [torch.ones_like(ranges), *(_factors(ranges, sizes, strength) for strength in STRENGTHS)]
    return min(found, key=error)


def _of_kv_heads(x: torch.Tensor, heads: tuple[int, int] | None) -> torch.Tensor:
    """The largest over the query heads of a KV head, for each of them."""
    if heads is None:
        return x
    by_head = x.view(-1, *heads)
    return by_head.amax(dim=1, keepdim=True).expand_as(by_head).flatten()


def _factors(ranges: torch.Tensor, sizes: torch.Tensor, strength: float) -> torch.Tensor:
    """Factors of one strength, around 1. Features that were never seen, or that meet no weight, get 1."""
    known = (ranges > 0) & (sizes > 0)
    if not bool(known.any()):
        return torch.ones_like(ranges)
    powers = strength * ranges.log2() - (1 - strength) * sizes.log2()
    powers = (powers - powers[known].median()).round().clamp(-MOST, MOST)
    return torch.where(known, powers, 0.0).exp2()


def kept(factors: torch.Tensor, makers: Sequence[torch.Tensor]) -> torch.Tensor:
    """``factors``, with 1 for features whose makers would lose bits when they are divided.

    makers: what makes the features, each with them along its first dimension, in the checkpoint's dtype.
    """
    for maker in makers:
        again = Factors(rows=factors)(Factors(rows=1 / factors)(maker))
        same = (again == maker).view(len(maker), -1).all(dim=1)
        factors = torch.where(same, factors, 1.0)
    return factors
