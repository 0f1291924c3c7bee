"""Products of a quantised weight in torch: the bits that the integer kernels must give, and what runs without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.layers.quantized import QuantizedWeight
from paceline.parallel.slabs import tree_sum

LEAST_PEAK = 1e-30  # of a group: below it every element is 0, so that 127 / peak stays finite


def integer_linear_reference(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype, slabs: int = 1
) -> torch.Tensor:
    """x: [T, in_features] -> [T, out_features], bit for bit what the kernels give.

    Sums within a group are sums of integers, so their order is nothing; groups of a slab are added in their order.
    """
    width = weight.shape[1] // slabs
    runs = [(start, start + width) for start in range(0, slabs * width, width)]
    total = tree_sum([_product(x[:, low:high], weight.columns(low, high)) for low, high in runs])
    return (total if bias is None else total + bias).to(out_dtype)


def _product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The float32 sums of one slab."""
    group = weight.rounded_together
    codes, x_scales = round_rows(x, group)
    dots = torch.einsum("tgk,ngk->gtn", codes.double(), _grouped(weight.codes, group).double()).float()  # exact sums
    sums = codes.double().sum(dim=2).float()
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for g, dot in enumerate(dots):
        product = dot if weight.has_row_scales else dot * weight.scales[:, g]
        total = total + product * x_scales[:, g : g + 1]
        if weight.minimums is not None:
            total = total + weight.minimums[:, g] * (sums[:, g] * x_scales[:, g])[:, None]
    if weight.has_row_scales:
        total = total * weight.scales[:, 0]
    return total


def round_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, float32 whole numbers -127 to 127 [T, groups, group], and scales, float32 [T, groups].

    A group with a NaN or an infinity has the scale NaN.
    """
    grouped = _grouped(x.float(), group)
    peak = grouped.abs().amax(dim=2)
    some = torch.isfinite(peak) & (peak >= LEAST_PEAK)
    most = torch.full_like(peak, 127.0)  # a number here would make torch multiply by a rounded reciprocal
    factor = torch.where(some, most / peak, 0.0).unsqueeze(2)
    codes = torch.where(some.unsqueeze(2), (grouped * factor).round(), 0.0)
    scales = torch.where(some, peak / most, torch.where(torch.isfinite(peak), 0.0, torch.nan))
    return codes, scales


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    """rows: [R, K] -> [R, groups, group], the last group filled up with zeros."""
    missing = -rows.shape[1] % group
    return F.pad(rows, (0, missing)).view(rows.shape[0], -1, group)
