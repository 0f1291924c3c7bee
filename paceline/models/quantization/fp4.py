"""FP4 (e2m1) weights with scales of groups: MXFP4 (OCP Microscaling Formats 1.0), whose scales are powers of two, and
NVFP4, whose scales are float8, with one more number for the tensor. Activations stay as they are."""

from __future__ import annotations

import torch

from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import FP8, LayerTensors, check_groups, matrix, need, refused

SCALE = "weight_scale"
EXPONENT, EXPONENT_BIAS = "U8", 127  # of MXFP4's scales


def check_mxfp4(layer: str, parts: LayerTensors, codes: str, group_size: int) -> None:
    """Raise ConfigError where weight and scales do not fit each other. codes: last part of the name of the codes."""
    _check_scales(layer, parts, codes, group_size, EXPONENT)


def check_nvfp4(layer: str, parts: LayerTensors, codes: str, group_size: int, of_tensor: str) -> None:
    """The same. of_tensor: last part of the name of the tensor's own number."""
    _check_scales(layer, parts, codes, group_size, FP8)
    number = need(layer, parts, of_tensor, ("F32",))
    if number.shape not in ((), (1,)) or not float(number.load()) > 0:
        raise refused(f"{layer}.{of_tensor} is not one positive number")


def _check_scales(layer: str, parts: LayerTensors, codes: str, group_size: int, kind: str) -> None:
    rows, halves = matrix(layer, parts, codes, ("U8",))
    check_groups(layer, group_size, 2 * halves)
    need(layer, parts, SCALE, (kind,), (rows, -(-2 * halves // group_size)))


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
