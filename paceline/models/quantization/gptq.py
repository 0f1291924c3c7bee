"""``gptq``: 4 or 8 bits, packed along the input features, with scales and zero points per group.

Zero points of the first format lie in the file one lower than they are, subtracted from whole words: 1 is added to
the words, not to the codes. Files with ``desc_act`` name the group of every input feature (``g_idx``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.layers.quantized import LinearWeight
from paceline.models.quantization.base import LayerTensors, Scheme, check_groups, matrix, need, refused, whole
from paceline.models.quantization.packing import check_order, ordered_weight, unpack

ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every code of a word
FORMATS = {"gptq": True, "gptq_v2": False}  # whether zero points lie one lower


def read_config(config: Mapping[str, Any]) -> Scheme:
    """See schemes.read_scheme."""
    bits, group_size = whole(config, "bits"), whole(config, "group_size", -1)
    if bits not in ONES:
        raise refused(f"gptq with {bits} bits is not supported (4, 8)")
    if group_size < 1 and group_size != -1:
        raise refused(f"gptq with group_size {group_size} is not supported (-1 or more than 0)")
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in FORMATS or config.get("is_marlin_format"):
        raise refused(f"gptq with checkpoint_format {layout!r} is not supported ({', '.join(FORMATS)}), nor is marlin")
    overrides = config.get("dynamic") or {}
    if any(not str(pattern).startswith("-:") for pattern in overrides):
        raise refused("gptq with widths of single layers (dynamic) is not supported")
    announced = (bool(config.get("sym", True)), bool(config.get("desc_act", False)))
    return Gptq(bits, group_size, FORMATS[layout], announced)


class Gptq(Scheme):
    """A scheme with one width and one group size."""

    marks = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, bits: int, group_size: int, lowered: bool, announced: tuple[bool, bool]) -> None:
        """group_size: input features; -1: all. lowered: zero points lie one lower than they are. announced: whether all
        zero points are the middle, and whether groups lie in an order of their own; a dry run goes by that."""
        self.bits, self.group_size, self.lowered = bits, group_size, lowered
        self.is_symmetric, self.is_ordered = announced

    def _shape(self, layer: str, parts: LayerTensors) -> tuple[int, int, int]:
        """Output features, input features, size of a group."""
        words, rows = matrix(layer, parts, "qweight", ("I32",))
        columns = words * (32 // self.bits)
        return rows, columns, columns if self.group_size == -1 else self.group_size

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        rows, columns, group_size = self._shape(layer, parts)
        check_groups(layer, group_size, columns)
        groups = -(-columns // group_size)
        need(layer, parts, "scales", ("F16", "BF16", "F32"), (groups, rows))
        need(layer, parts, "qzeros", ("I32",), (groups, -(-rows // (32 // self.bits))))
        check_order(layer, parts, "g_idx", columns, groups)

    def read(self, layer: str, parts: LayerTensors) -> LinearWeight:
        """See Scheme."""
        rows, _, group_size = self._shape(layer, parts)
        codes = unpack(parts["qweight"].load().t(), self.bits)
        words = parts["qzeros"].load()
        if self.lowered:
            words = words + ONES[self.bits]  # wraps around, as the subtraction did
        zeros = unpack(words, self.bits)[:, :rows].t()
        order = parts["g_idx"].load() if "g_idx" in parts else None
        if words.is_meta:  # a dry run
            zeros = torch.full(zeros.shape, 1 << (self.bits - 1)) if self.is_symmetric else zeros
            order = order if self.is_ordered else None
        return ordered_weight(codes, zeros, parts["scales"].load().t(), (self.bits, group_size), order)
