"""Weights rounded to the nearest code: what ``--quantize`` does to a checkpoint that is not quantised."""

from __future__ import annotations

from typing import get_args

import torch

from paceline.layers.quantized import ROUNDED_TOGETHER, QuantizedWeight
from paceline.option_values import QuantizeName

# Bits of a weight's code, then bits of an activation.
SCHEMES: tuple[str, ...] = tuple(name for name in get_args(QuantizeName) if name != "none")
GROUP_SIZE = 32  # elements of a row that share a 4-bit scale
ROWS_AT_ONCE = 4096  # bounds the float32 copy that rounding makes


def head_scheme(scheme: str) -> str:
    """The scheme of the LM head where layers have ``scheme``: 8 bits, for 4 cost the head more than they save."""
    return scheme.replace("w4", "w8")


def group_of_scheme(scheme: str) -> int:
    """QuantizedWeight.kept_together of what ``scheme`` makes of a wide weight."""
    if scheme.startswith("w4"):
        return GROUP_SIZE
    return ROUNDED_TOGETHER if scheme.endswith("a8") else 1


def round_to_nearest(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """``weight`` as codes. weight: [out_features, in_features], floating; scheme: one of SCHEMES.

    8 bits: one scale per output feature. 4 bits: a scale and a minimum per ``GROUP_SIZE`` elements, both numbers that
    float16 holds, so that kernels can keep them in two bytes. Raises ValueError for another scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    bits, in_features = int(scheme[1]), weight.shape[1]
    rounded = [_eight_bits(rows) if bits == 8 else _four_bits(rows) for rows in torch.split(weight, ROWS_AT_ONCE)]
    codes, scales, minimums = (torch.cat([parts[i] for parts in rounded]) for i in range(3))
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        minimums=None if bits == 8 else minimums,
        bits=bits,
        group_size=in_features if bits == 8 else GROUP_SIZE,
        int8_activations=scheme.endswith("a8"),
    )


def _eight_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes -127 to 127, scales, and minimums of 0."""
    rows = rows.float()
    scales = rows.abs().amax(dim=1, keepdim=True) / 127.0
    codes = (rows / _divisors(scales)).round().clamp(-127, 127).to(torch.int8)
    return codes, scales, torch.zeros_like(scales)


def _four_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes -8 to 7, scales and minimums, of groups from the smallest to the largest of their elements."""
    out_features, in_features = rows.shape
    num_groups = -(-in_features // GROUP_SIZE)
    padded = torch.nn.functional.pad(rows.float(), (0, num_groups * GROUP_SIZE - in_features), mode="replicate")
    groups = padded.view(out_features, num_groups, GROUP_SIZE)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scales = ((high - low) / 15.0).half().float()
    minimums = (low + 8.0 * scales).half().float()
    codes = ((groups - minimums) / _divisors(scales)).round().clamp(-8, 7).to(torch.int8)
    return codes.view(out_features, -1)[:, :in_features].contiguous(), scales.squeeze(2), minimums.squeeze(2)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)
