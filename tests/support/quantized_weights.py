"""Quantised weights of every kind that linear layers take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from paceline.layers.file_tables import FileTables
from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.round_to_nearest import SCHEMES, round_to_nearest


def grouped(weight: torch.Tensor, group_size: int, bits: int) -> QuantizedWeight:
    """Integer products; a scale that float16 does not hold for each group, and no minimums."""
    limit, (out_features, in_features) = (1 << (bits - 1)) - 1, weight.shape
    groups = torch.split(weight.float(), group_size, dim=1)
    scales = torch.stack([group.abs().amax(dim=1) / limit for group in groups], dim=1)
    codes = [(g / scales[:, i : i + 1]).round().to(torch.int8) for i, g in enumerate(groups)]
    assert scales.shape == (out_features, -(-in_features // group_size))
    return QuantizedWeight(torch.cat(codes, dim=1), scales, None, bits, group_size, True)


def shifted(weight: torch.Tensor, group_size: int, bits: int) -> QuantizedWeight:
    """Integer products; a scale and a minimum that float16 does not hold for each group."""
    groups = torch.split(weight.float(), group_size, dim=1)
    low, high = (torch.stack(list(ends), dim=1) for ends in zip(*(g.aminmax(dim=1) for g in groups), strict=True))
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-6)
    minimums, columns = low + (1 << (bits - 1)) * scales, torch.arange(weight.shape[1]) // group_size
    codes = ((weight.float() - minimums[:, columns]) / scales[:, columns]).round()
    codes = codes.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).to(torch.int8)
    return QuantizedWeight(codes, scales, minimums, bits, group_size, True)


def stepped(weight: torch.Tensor, group_size: int, bits: int, span: int, most: int) -> QuantizedWeight:
    """Scales, and with 4 bits minimums, that are whole numbers up to ``most`` times a step of ``span`` groups."""
    near = shifted(weight, group_size, bits) if bits == 4 else grouped(weight, group_size, bits)
    scales, scale_steps = _whole(near.scales, span, most)
    lowest, lowest_steps = None, None
    if near.minimums is not None:
        lowest, lowest_steps = _whole(near.minimums - 8 * near.scales, span, most)
    return _of_tables(weight, near, FileTables(scales, lowest, scale_steps, lowest_steps, span))


def in_halves(weight: torch.Tensor, group_size: int) -> QuantizedWeight:
    """4 bits, of which the scale and the lowest number of each group are float16."""
    near = shifted(weight, group_size, 4)
    assert near.minimums is not None
    return _of_tables(weight, near, FileTables(near.scales.half(), (near.minimums - 8 * near.scales).half()))


def _whole(table: torch.Tensor, span: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, int8 as ``table``, and float16 steps of ``span`` columns, of the sign of the largest."""
    steps = []
    for run in torch.split(table, span, dim=1):
        peak = run.gather(1, run.abs().argmax(dim=1, keepdim=True))
        steps.append((peak / most).half())
    joined = torch.cat(steps, dim=1)
    whole = table / joined.float().repeat_interleave(span, dim=1)[:, : table.shape[1]]
    return whole.nan_to_num(0.0).round().clamp(-most, most).to(torch.int8), joined


def _of_tables(weight: torch.Tensor, near: QuantizedWeight, tables: FileTables) -> QuantizedWeight:
    scales, minimums = tables.values()
    columns, limit = torch.arange(weight.shape[1]) // near.group_size, 1 << (near.bits - 1)
    rest = weight.float() if minimums is None else weight.float() - minimums[:, columns]
    codes = (rest / scales[:, columns]).nan_to_num(0.0).round().clamp(-limit, limit - 1).to(torch.int8)
    return QuantizedWeight(codes, scales, minimums, near.bits, near.group_size, True, tables=tables)


def float8(weight: torch.Tensor) -> QuantizedWeight:
    """e4m3 codes, a scale for each group of 128."""
    scales = torch.stack([g.float().abs().amax(dim=1) / 448 for g in torch.split(weight, 128, dim=1)], dim=1)
    columns = torch.arange(weight.shape[1]) // 128
    codes = (weight.float() / scales[:, columns]).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales, None, 8, 128, False)


def float4(weight: torch.Tensor) -> QuantizedWeight:
    """e2m1 numbers of the two signs, a power of two for each group of 32."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values, columns = torch.cat([values, -values]), torch.arange(weight.shape[1]) // 32
    peaks = torch.stack([group.float().abs().amax(dim=1) for group in torch.split(weight, 32, dim=1)], dim=1)
    scales = torch.exp2(torch.ceil(torch.log2(peaks / 6)))
    codes = ((weight.float() / scales[:, columns]).unsqueeze(-1) - values).abs().argmin(dim=-1)
    return QuantizedWeight((codes - 8).to(torch.int8), scales, None, 4, 32, False, float4=True)


def numbered(weight: torch.Tensor, group_size: int, divides: bool) -> QuantizedWeight:
    """e2m1 numbers, a float8 for each group, and a number for each row that multiplies or divides them."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values, columns = torch.cat([values, -values]), torch.arange(weight.shape[1]) // group_size
    peaks = torch.stack([group.float().abs().amax(dim=1) for group in torch.split(weight, group_size, dim=1)], dim=1)
    numbers = 61.7 + torch.arange(len(weight))
    float8s = (peaks / 6 * numbers.unsqueeze(1)).to(torch.float8_e4m3fn)
    tables = FileTables(float8s.half(), None, numbers=numbers if divides else 1 / numbers, divides=divides)
    scales, _ = tables.values()
    codes = ((weight.float() / scales[:, columns]).unsqueeze(-1) - values).abs().argmin(dim=-1)
    return QuantizedWeight((codes - 8).to(torch.int8), scales, None, 4, group_size, False, tables=tables, float4=True)


def divided(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in groups of half the size."""
    size = weight.group_size // 2
    scales = weight.scales[:, torch.arange(0, weight.shape[1], size) // weight.group_size]
    return replace(weight, scales=scales, group_size=size)


def _scheme(scheme: str) -> Callable[[torch.Tensor], QuantizedWeight]:
    return lambda weight: round_to_nearest(weight, scheme)


INTEGER: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "w8a8": _scheme("w8a8"),
    "w4a8": _scheme("w4a8"),
    "w8a8 groups of 128": lambda weight: grouped(weight, 128, 8),
    "w4a8 groups of 64": lambda weight: grouped(weight, 64, 4),
}
OF_FLOATS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "float8": float8,
    "float4": float4,
    "float4 groups of 16": lambda weight: divided(float4(weight)),
    "float4 times a number": lambda weight: numbered(weight, 16, divides=False),
    "float4 over a number": lambda weight: numbered(weight, 32, divides=True),
    "w4a16 groups of 128": lambda weight: replace(grouped(weight, 128, 4), int8_activations=False),
}
KINDS = INTEGER | {scheme: _scheme(scheme) for scheme in SCHEMES if scheme.endswith("a16")} | OF_FLOATS
ON_GPUS = [kind for kind in KINDS if "float4" not in kind]
# Integer products that only files have: a GGUF type's groups and tables, and zero points of whole rows.
OF_FILES: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q8_0": lambda weight: grouped(weight, 32, 8),
    "Q6_K": lambda weight: stepped(weight, 16, 6, 16, 127),
    "Q4_K": lambda weight: stepped(weight, 32, 4, 8, 63),
    "Q3_K": lambda weight: stepped(weight, 16, 4, 16, 31),
    "Q5_K": lambda weight: stepped(weight, 32, 6, 8, 63),
    "IQ4_XS": lambda weight: stepped(weight, 32, 8, 8, 31),
    "Q4_1": lambda weight: in_halves(weight, 32),
    "minimums in float32": lambda weight: shifted(weight, 32, 4),
    "int8 with zero points": lambda weight: shifted(weight, weight.shape[1], 8),
}
