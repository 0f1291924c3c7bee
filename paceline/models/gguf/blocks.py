"""Blocks of GGUF's quantised types as codes, scales and minimums: the numbers of the file, not rounded again.

A row of a tensor is a row of blocks. What a block holds is fixed by ggml (ggml-common.h); ``d`` and ``m`` are float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.layers.file_tables import MIDDLE, FileTables
from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.fp4 import powers_of_two

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Codes = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Decoded:
    """Blocks as FileTables has them: codes [blocks, codes of a block], tables [blocks, groups of a block], steps
    [blocks, 1]."""

    codes: Codes
    scales: Codes | Halves
    lowest: Codes | Halves | None = None
    scale_steps: Halves | None = None
    lowest_steps: Halves | None = None


def _half(blocks: Bytes, at: int) -> Halves:
    """The float16 at byte ``at`` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _low_then_high(packed: Bytes) -> Bytes:
    """The low halves of the bytes, then the high halves, along the last dimension."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _centred(codes: Bytes) -> Codes:
    """Codes that begin at 0 in the file, and at -MIDDLE in a weight."""
    return codes.view(np.int8) - np.int8(MIDDLE)


def _q8_0(blocks: Bytes) -> Decoded:
    """d, 32 codes."""
    return Decoded(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    """d, 32 codes: d * (code - 8)."""
    return Decoded(_centred(_low_then_high(blocks[:, 2:])), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    """d, m, 32 codes: d * code + m."""
    return Decoded(_centred(_low_then_high(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bits of 4 bytes, the lowest first, as 16 or 0: [blocks, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q5_0(blocks: Bytes) -> Decoded:
    """d, the fifth bits, the rest of 32 codes: d * (code - 16)."""
    codes = _low_then_high(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Decoded(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    """d, m, the fifth bits, the rest of 32 codes: d * code + m."""
    codes = _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Decoded(_centred(codes), _half(blocks, 0), _half(blocks, 2))


def _sixes(packed: Bytes) -> tuple[Codes, Codes]:
    """8 scales and 8 minimums of 6 bits each in 12 bytes, as Q4_K and Q5_K have them.

    The low 6 bits of the first 8 bytes are scales and minimums 0 to 3. The last 4 bytes hold the low halves of scales
    and minimums 4 to 7, whose high bits are the top bits of the first 8.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1).view(np.int8)
    return scales, np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1).view(np.int8)


def _q4_k(blocks: Bytes) -> Decoded:
    """d, m, `_sixes`, 256 codes: d * scale * code - m * minimum by groups of 32."""
    scales, minimums = _sixes(blocks[:, 4:16])
    codes = _low_then_high(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return Decoded(_centred(codes), scales, minimums, _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: Bytes) -> Decoded:
    """As Q4_K; before the codes, 32 bytes whose bit g is the fifth bit of a code of group g."""
    scales, minimums = _sixes(blocks[:, 4:16])
    high = np.stack([blocks[:, 16:48] >> g & 1 for g in range(8)], axis=1).reshape(-1, 256)
    codes = _low_then_high(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | high * np.uint8(16)
    return Decoded(_centred(codes), scales, minimums, _half(blocks, 0), -_half(blocks, 2))


def _pairs(packed: Bytes) -> Bytes:
    """Two bits of each byte at a time, the lowest first, of 64 bytes that are halved: [blocks, 256]."""
    halves = packed.reshape(-1, 2, 32)
    return np.stack([halves >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Decoded:
    """16 bytes of a scale below a minimum, 256 codes of 2 bits, d, m: d * scale * code - m * minimum, groups of 16."""
    scales, minimums = (blocks[:, :16] & 15).view(np.int8), (blocks[:, :16] >> 4).view(np.int8)
    return Decoded(_centred(_pairs(blocks[:, 16:80])), scales, minimums, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: Bytes) -> Decoded:
    """256 third bits, the low 2 bits of as many codes, 16 scales of 6 bits, d: d * (scale - 32) * (code - 4).

    Bit i of the first 32 bytes belongs to run i of 32 codes. 8 bytes hold the low halves of the scales, 4 bytes the
    pairs of bits above them.
    """
    third = np.stack([blocks[:, :32] >> run & 1 for run in range(8)], axis=1).reshape(-1, 256)
    codes = (_pairs(blocks[:, 32:96]) | third << 2).view(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (_low_then_high(packed[:, :8]) | high << 4).view(np.int8) - np.int8(32)
    return Decoded(codes, scales, scale_steps=_half(blocks, 108))


def _q6_k(blocks: Bytes) -> Decoded:
    """256 codes of 6 bits (128 bytes of low halves, 64 of high pairs of bits), 16 scales of int8, d: groups of 16."""
    halves = _low_then_high(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = (halves | _pairs(blocks[:, 128:192]) << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Decoded(codes, scales, scale_steps=_half(blocks, 208))


KEPT: dict[GGMLQuantizationType, tuple[Callable[[Bytes], Decoded], int, int]] = {  # reader, bits, elements of a group
    GGMLQuantizationType.Q8_0: (_q8_0, 8, 32),
    GGMLQuantizationType.Q4_0: (_q4_0, 4, 32),
    GGMLQuantizationType.Q4_1: (_q4_1, 4, 32),
    GGMLQuantizationType.Q5_0: (_q5_0, 6, 32),
    GGMLQuantizationType.Q5_1: (_q5_1, 6, 32),
    GGMLQuantizationType.Q2_K: (_q2_k, 4, 16),
    GGMLQuantizationType.Q3_K: (_q3_k, 4, 16),
    GGMLQuantizationType.Q4_K: (_q4_k, 4, 32),
    GGMLQuantizationType.Q5_K: (_q5_k, 6, 32),
    GGMLQuantizationType.Q6_K: (_q6_k, 6, 16),
}


IN_CODES = (*KEPT, GGMLQuantizationType.MXFP4)  # types whose codes a weight keeps


def _mxfp4(rows: Bytes) -> QuantizedWeight:
    """An exponent, 32 codes of numbers in FLOAT4. Inputs of such weights stay as they are."""
    count, blocks = rows.shape[0], rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType.MXFP4][1])
    return QuantizedWeight(
        codes=torch.tensor(_centred(_low_then_high(blocks[:, 1:]))).view(count, -1),
        scales=powers_of_two(torch.tensor(blocks[:, 0])).view(count, -1),
        minimums=None,
        bits=4,
        group_size=32,
        int8_activations=False,
        float4=True,
    )


def weight_of_blocks(rows: Bytes, kind: GGMLQuantizationType) -> QuantizedWeight:
    """A matrix of a type in IN_CODES. rows: [out_features, bytes of a row]. Products with it are made of integers, but
    for MXFP4."""
    if kind is GGMLQuantizationType.MXFP4:
        return _mxfp4(rows)
    read, bits, group_size = KEPT[kind]
    count = rows.shape[0]
    block = read(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    scales, lowest, scale_steps, lowest_steps = (
        None if part is None else torch.tensor(part).view(count, -1)
        for part in (block.scales, block.lowest, block.scale_steps, block.lowest_steps)
    )
    assert scales is not None
    tables = FileTables(scales, lowest, scale_steps, lowest_steps, 1 if scale_steps is None else block.scales.shape[1])
    values, minimums = tables.values()
    return QuantizedWeight(
        codes=torch.tensor(block.codes).view(count, -1),
        scales=values,
        minimums=minimums,
        bits=bits,
        group_size=group_size,
        int8_activations=True,
        tables=tables if tables.are_numbers() else None,
    )
