"""Weights as the CPU's kernels read them: packed once, described by ``Matrix`` of kernels/matrix.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from paceline.layers.file_tables import FileTables, fits_half
from paceline.layers.quantized import QuantizedWeight
from paceline.layers.shared_weights import kept

DENSE, INTEGER, DEQUANTISED, FLOAT8, FLOAT4 = range(5)  # Format of kernels/matrix.h
NONE, TIMES, OVER = range(3)  # Numbers
FLOAT8_AS_HALF = 256.0  # how much smaller a float8 is whose digits are read as a float16's
MOST_INPUTS = 1 << 17  # of a product of integers: 127 * 128 each, summed in 32 bits
GROUP_MULTIPLE = 8  # elements; groups of other sizes cannot be packed


class CMatrix(ctypes.Structure):
    """``Matrix`` of kernels/matrix.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "format", "bits", "group")),
        *((name, ctypes.c_int64) for name in ("row_scales", "half_scales", "has_minimums")),
        *((name, ctypes.c_int64) for name in ("steps_span", "from_lowest", "numbers", "slabs")),
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
        matrix.format = format_of(weight)
        matrix.row_scales = int(weight.has_row_scales)
        matrix.group = _group_of(weight)
        matrix.bits = weight.bits if weight.bits != 6 or _packs_six(weight, matrix.group) else 8
        tables = _tables_of(weight)
        matrix.has_minimums = int(weight.minimums is not None)
        matrix.from_lowest = int(tables.lowest is not None and tables is weight.tables)
        matrix.steps_span = tables.span if tables.scale_steps is not None else 0
        matrix.numbers = NONE if tables.numbers is None else OVER if tables.divides else TIMES
        values = [table for table in (tables.scales, tables.lowest) if table is not None]
        matrix.half_scales = int(not matrix.steps_span and not matrix.numbers and all(map(fits_half, values)))
        table_type = torch.int8 if matrix.steps_span else torch.float16 if matrix.half_scales else torch.float32
        parts = [weight.codes.contiguous(), *_in_memory(tables, table_type)]

        def fill(packed: torch.Tensor) -> None:
            addresses = [None if part is None else part.data_ptr() for part in parts]
            library.pl_pack_panels(self.address, *addresses, packed.data_ptr())

        return kept((library.pl_panels_bytes(self.address),), torch.uint8, fill)


def _in_memory(tables: FileTables, table_type: torch.dtype) -> list[torch.Tensor | None]:
    """Scales and minimums, steps of both, and numbers, each as it is packed."""
    scales, numbers = tables.scales.to(table_type), tables.numbers
    if numbers is not None:
        scales = tables.scales.to(torch.float8_e4m3fn).view(torch.uint8)
        numbers = numbers / FLOAT8_AS_HALF if tables.divides else numbers * FLOAT8_AS_HALF
    lowest = None if tables.lowest is None else tables.lowest.to(table_type)
    every = (scales, lowest, tables.scale_steps, tables.lowest_steps, numbers)
    return [None if table is None else table.contiguous() for table in every]


def _tables_of(weight: QuantizedWeight) -> FileTables:
    """The tables that take the fewest bytes; scales and minimums themselves where a file has no smaller ones."""
    if weight.tables is not None and format_of(weight) in (INTEGER, FLOAT4) and not weight.has_row_scales:
        return weight.tables
    return FileTables(weight.scales, weight.minimums)


def format_of(weight: QuantizedWeight) -> int:
    """How the kernels multiply ``weight``."""
    if weight.codes.dtype is torch.float8_e4m3fn:
        return FLOAT8
    if weight.float4:
        return FLOAT4
    return INTEGER if weight.int8_activations else DEQUANTISED


def _group_of(weight: QuantizedWeight) -> int:
    """Elements of a row that a kernel takes together."""
    in_features, group = weight.shape[1], weight.rounded_together
    if weight.int8_activations and in_features > MOST_INPUTS:
        raise ValueError(f"{in_features} products of integers do not fit 32 bits: at most {MOST_INPUTS}")
    if group < in_features and group % GROUP_MULTIPLE:
        raise ValueError(f"groups of {group} elements: the kernels take multiples of {GROUP_MULTIPLE}")
    return group


def _packs_six(weight: QuantizedWeight, group: int) -> bool:
    """Whether codes of 6 bits can lie in 6: those of 16 elements lie together."""
    return format_of(weight) == INTEGER and group % 16 == 0 and weight.shape[1] % 16 == 0


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
