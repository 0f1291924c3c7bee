"""``fp8``: float8_e4m3fn weights with a scale per block (DeepSeek-V3, Qwen3), per output feature or per tensor.
``fbgemm_fp8`` (Meta's Llama 3.1 405B) has one per output feature.

A weight is its code TIMES ``weight_scale_inv``, whatever the name says. Blocks have it, and weights with one scale that
transformers wrote. Activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import (
    FLOATS,
    FP8,
    LayerTensor,
    LayerTensors,
    Scheme,
    check_groups,
    matrix,
    need,
    refused,
)

BLOCK_SCALE, SCALE = "weight_scale_inv", "weight_scale"


def read_config(config: Mapping[str, Any]) -> Scheme:
    """See schemes.read_scheme."""
    if (kind := config.get("fmt", "e4m3")) != "e4m3":
        raise refused(f"fp8 with fmt {kind!r} is not supported (e4m3)")
    block = config.get("weight_block_size")
    if block is None:
        return Fp8(None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise refused(f"fp8 with weight_block_size {block!r} is not supported (two sizes)")
    return Fp8((sizes[0], sizes[1]))


class Fp8(Scheme):
    """A scheme with one size of blocks."""

    marks = frozenset((BLOCK_SCALE, SCALE))
    ignored = frozenset(("input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale"))

    def __init__(self, block: tuple[int, int] | None) -> None:
        """block: output and input features that share a scale; None: whole rows, or the whole weight."""
        self.block = block

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        check_scales(layer, parts, self._scale(parts), self.block)

    def read(self, layer: str, parts: LayerTensors) -> QuantizedWeight:
        """See Scheme."""
        return fp8_weight(parts["weight"], parts[self._scale(parts)], self.block)

    def _scale(self, parts: LayerTensors) -> str:
        return BLOCK_SCALE if self.block or BLOCK_SCALE in parts else SCALE


def check_scales(layer: str, parts: LayerTensors, name: str, block: tuple[int, int] | None) -> None:
    """Raise ConfigError where weight and scales do not fit each other."""
    rows, columns = matrix(layer, parts, "weight", (FP8,))
    scale = need(layer, parts, name, FLOATS)
    if block is not None:
        check_groups(layer, block[1], columns)
        need(layer, parts, name, FLOATS, (-(-rows // block[0]), -(-columns // block[1])))
    elif scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        raise refused(f"{layer}.{name} has shape {scale.shape}: neither one scale nor {rows}, one an output feature")


def fp8_weight(weight: LayerTensor, scale: LayerTensor, block: tuple[int, int] | None) -> QuantizedWeight:
    """A weight that was checked; scales of blocks and of tensors are repeated for every row."""
    rows, columns = weight.shape
    scales = scale.load().float()
    if block is not None:
        scales = scales.repeat_interleave(block[0], dim=0)[:rows]
    else:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    return QuantizedWeight(
        codes=weight.load(),
        scales=torch.clone(scales, memory_format=torch.contiguous_format),
        minimums=None,
        bits=8,
        group_size=columns if block is None else block[1],
        int8_activations=False,
    )
