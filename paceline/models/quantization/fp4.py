"""FP4 (e2m1) weights with scales of groups: MXFP4 (OCP Microscaling Formats 1.0), whose scales are powers of two, and
NVFP4, whose scales are float8, with one more number for the tensor. Activations stay as they are."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.layers.file_tables import FileTables
from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import FP8, LayerTensors, check_groups, matrix, need, refused

SCALE = "weight_scale"
NAN8 = 0x7F  # a float8 whose bits are lower has no sign and is a number
EXPONENT, EXPONENT_BIAS = "U8", 127  # of MXFP4's scales


def check_mxfp4(layer: str, parts: LayerTensors, codes: str, group_size: int) -> None:
    """Raise ConfigError where weight and scales do not fit each other. codes: last part of the name of the codes."""
    _check_scales(layer, parts, codes, group_size, EXPONENT)


def check_nvfp4(layer: str, parts: LayerTensors, codes: str, group_size: int, of_tensor: str) -> None:
    """The same. of_tensor: last part of the name of the tensor's own number."""
    _check_scales(layer, parts, codes, group_size, FP8)
    number = need(layer, parts, of_tensor, ("F32",))
    loaded = number.load()
    if number.shape not in ((), (1,)) or not (loaded.is_meta or float(loaded) > 0):
        raise refused(f"{layer}.{of_tensor} is not one positive number")


def _check_scales(layer: str, parts: LayerTensors, codes: str, group_size: int, kind: str) -> None:
    rows, halves = matrix(layer, parts, codes, ("U8",))
    check_groups(layer, group_size, 2 * halves)
    need(layer, parts, SCALE, (kind,), (rows, -(-2 * halves // group_size)))


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8, exponents above a bias of 127 -> float32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - EXPONENT_BIAS)


def nvfp4_weight(
    packed: torch.Tensor, scales: torch.Tensor, number: torch.Tensor, group_size: int, divides: bool
) -> QuantizedWeight:
    """packed: see ``float4_weight``; scales: float8 [out_features, groups], which ``number``, float32, multiplies or
    divides."""
    every = number.float().reshape(1).expand(len(scales))
    tables = FileTables(scales.to(torch.float16), None, numbers=every.clone(), divides=divides)
    weight = float4_weight(packed, tables.values()[0], group_size)
    return replace(weight, tables=tables) if scales.is_meta or _are_sizes(scales, number) else weight


def _are_sizes(scales: torch.Tensor, number: torch.Tensor) -> bool:
    """Whether kernels can make the scales: no NaN and no sign, and a number that is far from the ends of float32."""
    return bool((scales.view(torch.uint8) < NAN8).all()) and 2.0**-100 < float(number) < 2.0**100


def float4_weight(packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> QuantizedWeight:
    """packed: uint8 [out_features, in_features / 2], two numbers a byte, the lower half first; scales: float32
    [out_features, groups]."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return QuantizedWeight(
        codes=halves.view(torch.int8) - 8,
        scales=scales.contiguous(),
        minimums=None,
        bits=4,
        group_size=group_size,
        int8_activations=False,
        float4=True,
    )
