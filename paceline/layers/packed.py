"""Weights as the CPU's kernels read them: packed once, described by ``Matrix`` of kernels/matrix.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from paceline.layers.quantized import QuantizedWeight
from paceline.layers.shared_weights import kept

DENSE, INTEGER, DEQUANTISED, FLOAT8 = range(4)  # Format of kernels/matrix.h
MOST_INPUTS = 1 << 17  # of a product of integers: 127 * 128 each, summed in 32 bits
GROUP_MULTIPLE = 8  # elements; groups of other sizes cannot be packed


class CMatrix(ctypes.Structure):
    """``Matrix`` of kernels/matrix.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "format", "bits", "group")),
        *((name, ctypes.c_int64) for name in ("row_scales", "half_scales", "has_minimums", "slabs")),
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
    ]


class PackedMatrix:
    """A weight and a bias for the kernels. The tensors that it was made of need not be kept."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, slabs: int = 1
    ) -> None:
        """bias: float32 [out_features]; slabs: see Linear. Raises ValueError for a weight that no kernel can hold."""
        self._bias = bias
        self._matrix = CMatrix(*weight.shape, bias=None if bias is None else bias.data_ptr(), slabs=slabs)
        self.address = ctypes.addressof(self._matrix)  # for kernels
        if isinstance(weight, QuantizedWeight):
            self.packed = self._panels(library, weight)
        else:
            self.packed = pack_dense(library, weight)
        self._matrix.packed = self.packed.data_ptr()

    def _panels(self, library: ctypes.CDLL, weight: QuantizedWeight) -> torch.Tensor:
        matrix = self._matrix
        matrix.format, matrix.bits = format_of(weight), weight.bits
        matrix.row_scales = int(weight.has_row_scales)
        matrix.group = _group_of(weight)
        tables = [weight.scales] if weight.minimums is None else [weight.scales, weight.minimums]
        matrix.has_minimums, matrix.half_scales = int(weight.minimums is not None), int(all(map(_fits_half, tables)))
        table_type = torch.float16 if matrix.half_scales else torch.float32
        packed_tables = [table.to(table_type).contiguous() for table in tables]
        codes = weight.codes.contiguous()
        minimums = packed_tables[1].data_ptr() if matrix.has_minimums else None

        def fill(packed: torch.Tensor) -> None:
            library.pl_pack_panels(
                self.address, codes.data_ptr(), packed_tables[0].data_ptr(), minimums, packed.data_ptr()
            )

        return kept((library.pl_panels_bytes(self.address),), torch.uint8, fill)


def format_of(weight: QuantizedWeight) -> int:
    """How the kernels multiply ``weight``."""
    if weight.codes.dtype is torch.float8_e4m3fn:
        return FLOAT8
    return INTEGER if weight.int8_activations else DEQUANTISED


def _group_of(weight: QuantizedWeight) -> int:
    """Elements of a row that a kernel takes together."""
    in_features, group = weight.shape[1], weight.rounded_together
    if weight.int8_activations and in_features > MOST_INPUTS:
        raise ValueError(f"{in_features} products of integers do not fit 32 bits: at most {MOST_INPUTS}")
    if group < in_features and group % GROUP_MULTIPLE:
        raise ValueError(f"groups of {group} elements: the kernels take multiples of {GROUP_MULTIPLE}")
    return group


def pack_dense(library: ctypes.CDLL, weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features], bf16 or fp32 -> [elements], in the order of kernels/blocks.h."""
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    is_bf16 = weight.dtype is torch.bfloat16
    pack: Callable[..., None] = library.pl_pack_bf16 if is_bf16 else library.pl_pack_f32
    elems = library.pl_packed_elems(out_features, in_features, int(is_bf16))
    return kept(
        (elems,), weight.dtype, lambda packed: pack(weight.data_ptr(), out_features, in_features, packed.data_ptr())
    )


def _fits_half(table: torch.Tensor) -> bool:
    """Whether float16 holds every number of ``table``."""
    halves = table.half()
    return bool(torch.isfinite(halves).all()) and torch.equal(halves.float(), table)
