"""``awq``: 4 bits, packed along the output features in an interleaved order, with scales and zero points per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import LayerTensors, Scheme, check_groups, matrix, need, refused, whole
from paceline.models.quantization.packing import unpack, weight_of

BITS, CODES = 4, 8  # of a code; codes of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature, of eight, whose code lies at each place of a word


def read_config(config: Mapping[str, Any]) -> Scheme:
    """See schemes.read_scheme."""
    bits = whole(config, "bits" if "bits" in config else "w_bit")
    group_size = whole(config, "group_size" if "group_size" in config else "q_group_size")
    version = str(config.get("version", "gemm")).lower()
    if bits != BITS:
        raise refused(f"awq with {bits} bits is not supported ({BITS})")
    if version != "gemm":
        raise refused(f"awq of version {version!r} is not supported (gemm)")
    if group_size < 1 and group_size != -1:
        raise refused(f"awq with group_size {group_size} is not supported (-1 or more than 0)")
    if not config.get("zero_point", True):
        raise refused("awq without zero points is not supported")
    return Awq(group_size)


class Awq(Scheme):
    """A scheme with one group size."""

    marks = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, group_size: int) -> None:
        """group_size: input features; -1: all."""
        self.group_size = group_size

    def _shape(self, layer: str, parts: LayerTensors) -> tuple[int, int, int]:
        """Output features, input features, size of a group."""
        columns, words = matrix(layer, parts, "qweight", ("I32",))
        return words * CODES, columns, columns if self.group_size == -1 else self.group_size

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        rows, columns, group_size = self._shape(layer, parts)
        check_groups(layer, group_size, columns)
        groups = -(-columns // group_size)
        need(layer, parts, "scales", ("F16", "BF16", "F32"), (groups, rows))
        need(layer, parts, "qzeros", ("I32",), (groups, rows // CODES))

    def read(self, layer: str, parts: LayerTensors) -> QuantizedWeight:
        """See Scheme."""
        codes, zeros = (_in_order(parts[name].load()) for name in ("qweight", "qzeros"))
        group_size = self._shape(layer, parts)[2]
        return weight_of(codes.t().contiguous(), zeros.t(), parts["scales"].load().t(), BITS, group_size)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n], by output feature."""
    places = torch.tensor(ORDER).argsort()
    codes = unpack(words, BITS)
    return codes.view(words.shape[0], -1, CODES)[:, :, places].view(codes.shape)
