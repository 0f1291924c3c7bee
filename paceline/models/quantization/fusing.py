"""Layers that are multiplied together, where a checkpoint quantised them in unlike ways."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from paceline.layers.quantized import LinearWeight, QuantizedWeight, fuse
from paceline.models.quantization.base import refused

log = logging.getLogger(__name__)


def fuse_layers(weights: Mapping[str, LinearWeight]) -> LinearWeight:
    """One weight whose output is the outputs of ``weights``, by name, side by side.

    Codes of unlike widths or groups become those of the wider width and of groups that divide all, which changes no
    value. Beside a layer of floats, the others become floats too. Raises ConfigError naming layers that mix float8
    or float4 with whole numbers, or inputs in int8 with others.
    """
    parts = [weight for weight in weights.values() if isinstance(weight, QuantizedWeight)]
    floats = [weight for weight in weights.values() if isinstance(weight, torch.Tensor)]
    if not parts:
        return fuse(floats)
    if floats:
        log.info("kept as floats, because one of them is not quantised: %s", ", ".join(weights))
        return fuse([_float(weight, floats[0].dtype) for weight in weights.values()])
    if len({(part.codes.dtype, part.int8_activations, part.float4) for part in parts}) > 1:
        raise refused(f"{', '.join(weights)} are multiplied together, but quantised in unlike ways")
    return fuse(_alike(parts))


def _float(weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantised().to(dtype) if isinstance(weight, QuantizedWeight) else weight


def _alike(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """The same values with one width and one size of groups."""
    columns = parts[0].shape[1]
    shared = {part.group_size for part in parts if part.group_size < columns}
    size, bits = math.gcd(*shared) if shared else columns, max(part.bits for part in parts)
    return [_regrouped(replace(part, bits=bits), size) for part in parts]


def _regrouped(part: QuantizedWeight, size: int) -> QuantizedWeight:
    """The same values in groups of ``size``, which divides the present one, or of a row that has one group."""
    columns = part.shape[1]
    if min(part.group_size, columns) == size:
        return replace(part, group_size=size)
    old = torch.arange(0, columns, size, device=part.codes.device) // part.group_size
    minimums = None if part.minimums is None else part.minimums[:, old]
    whole = part.tables is not None and columns % part.group_size == 0
    tables = part.tables.divided(part.group_size // size) if part.tables and whole else None
    return replace(part, scales=part.scales[:, old], minimums=minimums, group_size=size, tables=tables)


def reordered(weight: LinearWeight, rows: torch.Tensor) -> LinearWeight:
    """Output features in another order. rows: int64 [out_features], the present place of each."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    return weight.of_rows(rows)
