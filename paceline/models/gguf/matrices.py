"""Matrices of GGUF's quantised types, made of their blocks in slices that stay in a core's cache: a matrix takes no
memory but its own, and what a slice becomes on its way.

All of it is numpy's on one thread. A slice's dozen of operations are too short for a second thread to be woken between
them, and torch's threads wait for one another at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.layers.file_tables import MIDDLE, FileTables
from paceline.layers.quantized import QuantizedWeight
from paceline.models.gguf.blocks import IN_CODES, KEPT, Bytes, Codes, Decoded, Floats, run_of

SLICE = 1 << 19  # codes that are read at once
INFINITE = 0x7C00  # bits of a float16 that are all set in what is infinite or not a number
Table = npt.NDArray[Any]


def weight_of_blocks(rows: Bytes, kind: GGMLQuantizationType) -> QuantizedWeight:
    """A matrix of a type in IN_CODES. rows: [out_features, bytes of a row].

    Products with it are made of integers, but for MXFP4, beside whose numbers inputs stay as they are.
    """
    (read, bits, group_size), (size, width) = IN_CODES[kind], GGML_QUANT_SIZES[kind]
    blocks, count = rows.reshape(-1, width), rows.shape[0]
    codes, found, step = np.empty((len(blocks), size), np.int8), [], max(1, SLICE // size)
    with np.errstate(all="ignore"):  # a file may have what is no number
        for first in range(0, len(blocks), step):
            decoded = read(blocks[first : first + step])
            _put(decoded, codes[first : first + step])
            tables = (decoded.scales, decoded.lowest, decoded.scale_steps, decoded.lowest_steps)
            found.append((*tables, *_values(decoded)))
    joined = [_joined(parts, count) for parts in zip(*found, strict=True)]
    scales, lowest, scale_steps, lowest_steps, values, minimums = joined
    assert scales is not None
    assert values is not None
    span = 1 if scale_steps is None else scales.shape[1] // scale_steps.shape[1]
    finite = kind in KEPT and all(_finite(table) for table in joined[:4])
    return QuantizedWeight(
        codes=torch.from_numpy(codes).view(count, -1),
        scales=values,
        minimums=minimums,
        bits=bits,
        group_size=group_size,
        int8_activations=kind in KEPT,
        tables=FileTables(scales, lowest, scale_steps, lowest_steps, span) if finite else None,
        float4=kind not in KEPT,
    )


def _put(block: Decoded, codes: Codes) -> None:
    """Write a slice's codes, as a weight has them, into its part of the matrix."""
    if block.zero:
        np.subtract(block.codes.view(np.int8), np.int8(block.zero), out=codes)
    else:
        run = run_of(codes.shape[1])
        codes.view(run)[:] = block.codes.view(run)


def _values(block: Decoded) -> tuple[Floats, Floats | None]:
    """Scales and minimums, see FileTables.values."""
    scales = _stepped(block.scales, block.scale_steps)
    if block.lowest is None:
        return scales, None
    return scales, _stepped(block.lowest, block.lowest_steps) + np.float32(MIDDLE) * scales


def _stepped(table: Codes | npt.NDArray[np.floating[Any]], steps: npt.NDArray[np.float16] | None) -> Floats:
    wide = table.astype(np.float32)
    return wide if steps is None else np.multiply(wide, steps.astype(np.float32), out=wide)


def _joined(parts: Sequence[Table | None], count: int) -> torch.Tensor | None:
    """The parts of a matrix of ``count`` rows, [count, ...]; None where there are none."""
    found = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(found)).view(count, -1) if found else None


def _finite(table: torch.Tensor | None) -> bool:
    """Whether nothing in it is infinite or not a number; FileTables.are_numbers in one pass over half the bytes."""
    if table is None or table.dtype is not torch.float16:
        return True
    return bool((table.numpy().view(np.uint16) & INFINITE != INFINITE).all())
