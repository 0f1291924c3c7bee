"""Codes out of 32-bit words, and the weight that codes, zero points and scales make."""

from __future__ import annotations

import torch

from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.quantization.base import LayerTensors, need, refused


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]: the codes of a word begin at its lowest bits.

    bits: 4 or 8.
    """
    in_bytes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return in_bytes
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).view(words.shape[0], -1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, n] -> int32 [rows, ceil(n * bits / 32)], padded with 0: the inverse of ``unpack``."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    return padded.contiguous().view(torch.int32)


def weight_of(
    unsigned: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group_size: int,
) -> QuantizedWeight:
    """The weight whose elements are scale * (code - zero), by which only the weight is quantised.

    unsigned: uint8 [out_features, in_features], codes from 0; zeros: [out_features, groups], of the same codes;
    scales: floating, shaped as zeros.
    """
    middle = 1 << (bits - 1)
    codes = (unsigned ^ 128).view(torch.int8) if bits == 8 else unsigned.view(torch.int8) - middle
    scales = scales.float().contiguous()
    shifts = middle - zeros.float()
    shifted = shifts.is_meta or bool(shifts.any())  # a dry run sees no zero points, and has none where all are alike
    return QuantizedWeight(
        codes=codes.contiguous(),
        scales=scales,
        minimums=(scales * shifts).contiguous() if shifted else None,
        bits=bits,
        group_size=group_size,
        int8_activations=False,
    )


def check_order(layer: str, parts: LayerTensors, name: str, columns: int, groups: int) -> None:
    """Raise ConfigError where ``name``, the group of each input feature, is no such table. Absent: nothing to check."""
    if name not in parts:
        return
    order = need(layer, parts, name, ("I32", "I64"), (columns,)).load()
    if order.is_meta:  # a dry run
        return
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise refused(f"{layer}.{name} names groups that are not there: {groups} have scales")


def ordered_weight(
    unsigned: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    widths: tuple[int, int],
    order: torch.Tensor | None,
) -> LinearWeight:
    """``weight_of``, where ``order`` names the group of each input feature (``desc_act``, ``actorder``).

    widths: bits of a code, and group_size. order: whole numbers [in_features]; None: k // group_size. Groups out of
    that order make float32 [out_features, in_features]: layers that are multiplied together share an input, which
    cannot be put in the order of each.
    """
    bits, group_size = widths
    if order is None or scales.shape[1] == 1 or _in_order(order, group_size):
        return weight_of(unsigned, zeros, scales, bits, group_size)
    if order.is_meta:  # a dry run
        return torch.empty_like(unsigned, dtype=torch.float32)
    groups = order.long()
    return scales.float()[:, groups] * (unsigned.float() - zeros.float()[:, groups])


def _in_order(order: torch.Tensor, group_size: int) -> bool:
    """Whether it is k // group_size. A dry run sees no numbers: there, a file that has an order has another one."""
    return not order.is_meta and torch.equal(order.long(), torch.arange(len(order)) // group_size)
