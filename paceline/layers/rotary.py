"""Tables of rotary angles (Su et al. 2021), with the scalings of the supported families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rope_table(
    head_dim: int,
    theta: float,
    max_positions: int,
    scaling: Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """float32 [max_positions, head_dim]: cosines of head_dim/2 angles, then their sines (yarn: times its factor).

    rotary_dim: elements of a head that are rotated, the other angles are 0 (``rotary_order``); None: all.
    """
    turned = rotary_dim or head_dim
    frequencies = 1.0 / (theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))
    factor = 1.0
    if scaling is not None and scaling.get("rope_type") == "yarn":
        frequencies, factor = _yarn(frequencies, theta, scaling), yarn_attention_factor(scaling)
    else:
        frequencies = _scale(frequencies, scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    kept = (max_positions, (head_dim - turned) // 2)
    return torch.cat((cos, torch.ones(kept), sin, torch.zeros(kept)), dim=-1)


def rotary_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Where each element of a head comes from when only its first ``rotary_dim`` are rotated: int64 [head_dim].

    Kernels turn element i with element i + head_dim/2. In this order each rotated pair lies so, and so do pairs of
    elements that pass unchanged. Products of queries and keys do not depend on the order, if both have it.
    """
    every, half = torch.arange(head_dim), rotary_dim // 2
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    return torch.cat((every[:half], every[rotary_dim:middle], every[half:rotary_dim], every[middle:]))


def _scale(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return frequencies
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported (default, linear, llama3, yarn)")
    # Llama 3.1: low frequencies are stretched by `factor`, high ones kept, those between are blended.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): dimensions that turn more than ``beta_fast`` times over the original
    context are kept, those that turn less than ``beta_slow`` times stretched by ``factor``, between them a ramp."""
    half = frequencies.shape[0]
    original = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:  # that turns so many times over the original context
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / float(scaling["factor"]) * ramp + frequencies * (1 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much yarn sharpens attention for a context ``factor`` times as long; DeepSeek's scale takes its square."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """What yarn multiplies cosines and sines by."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor, mscale, all_dim = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")
    times = float(scaling.get("attn_factor") or 1.0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) * times
    return yarn_mscale(factor) * times
