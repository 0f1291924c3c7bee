"""FP4 (e2m1) weights with scales of groups: MXFP4 (OCP Microscaling Formats 1.0), whose scales are powers of two, and
NVFP4, whose scales are float8, over one number for the tensor. Activations stay as they are."""

from __future__ import annotations

import torch

from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import FP8, LayerTensors, check_groups, matrix, need, refused

PACKED, SCALE, GLOBAL_SCALE = "weight_packed", "weight_scale", "weight_global_scale"
EXPONENT, EXPONENT_BIAS = "U8", 127  # of MXFP4's scales


def check_fp4(layer: str, parts: LayerTensors, group_size: int, has_global: bool) -> None:
    """Raise ConfigError where weight and scales do not fit each other. has_global: as NVFP4."""
    rows, halves = matrix(layer, parts, PACKED, ("U8",))
    columns = 2 * halves
    check_groups(layer, group_size, columns)
    need(layer, parts, SCALE, (FP8,) if has_global else (EXPONENT,), (rows, -(-columns // group_size)))
    if not has_global:
        return
    divisor = need(layer, parts, GLOBAL_SCALE, ("F32",))
    if divisor.shape not in ((), (1,)) or not float(divisor.load()) > 0:
        raise refused(f"{layer}.{GLOBAL_SCALE} is not one positive number")


def fp4_weight(parts: LayerTensors, group_size: int, has_global: bool) -> QuantizedWeight:
    """A weight that was checked."""
    scales = parts[SCALE].load()
    if has_global:
        return float4_weight(parts[PACKED].load(), scales.float() / parts[GLOBAL_SCALE].load().float(), group_size)
    return float4_weight(parts[PACKED].load(), powers_of_two(scales), group_size)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8, exponents above a bias of 127 -> float32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - EXPONENT_BIAS)


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
