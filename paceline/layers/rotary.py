"""Tables of rotary angles (Su et al. 2021), with the scalings of the supported families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rope_table(
    head_dim: int, theta: float, max_positions: int, scaling: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """float32 [max_positions, head_dim]: cosines of head_dim/2 angles, then their sines."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    frequencies = _scale(frequencies, scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).contiguous()


def _scale(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return frequencies
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported (default, linear, llama3)")
    # Llama 3.1: low frequencies are stretched by `factor`, high ones kept, those between are blended.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies
