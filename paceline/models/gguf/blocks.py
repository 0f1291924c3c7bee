"""Blocks of GGUF's quantised types as codes, scales and minimums: the numbers of the file, not rounded again.

A row of a tensor is a row of blocks. What a block holds is fixed by ggml (ggml-common.h); ``d`` and ``m`` are float16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.layers.quantized import QuantizedWeight

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Floats = npt.NDArray[np.float32]
Decoded = tuple[npt.NDArray[np.int8], Floats, Floats | None]  # [blocks, codes], then [blocks, groups] twice
MIDDLE = 8  # of the codes of 4 bits, which begin at 0 in the file


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _low_then_high(packed: Bytes) -> Bytes:
    """The low halves of the bytes, then the high halves, along the last dimension."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _centred(codes: Bytes) -> npt.NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(MIDDLE)


def _q8_0(blocks: Bytes) -> Decoded:
    """d, 32 codes."""
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Decoded:
    """d, 32 codes: d * (code - 8)."""
    return _centred(_low_then_high(blocks[:, 2:])), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    """d, m, 32 codes: d * code + m."""
    scales, minimums = _half(blocks, 0), _half(blocks, 2)
    return _centred(_low_then_high(blocks[:, 4:])), scales, minimums + MIDDLE * scales


def _q4_k(blocks: Bytes) -> Decoded:
    """d, m, 8 scales and 8 minimums of 6 bits, 256 codes: d * scale * code - m * minimum by groups of 32.

    The low 6 bits of the first 8 of the 12 bytes are scales and minimums 0 to 3. The last 4 bytes hold the low halves
    of scales and minimums 4 to 7, whose high bits are the top bits of the first 8.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1).astype(np.float32)
    minimums = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1).astype(np.float32)
    scales, minimums = scales * _half(blocks, 0), minimums * _half(blocks, 2)
    codes = _low_then_high(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _centred(codes), scales, MIDDLE * scales - minimums


def _q6_k(blocks: Bytes) -> Decoded:
    """256 codes of 6 bits (128 bytes of low halves, 64 of high pairs of bits), 16 scales of int8, d: groups of 16."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    halves = _low_then_high(low).reshape(-1, 2, 4, 32)
    pairs = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (halves | pairs << 4).reshape(-1, 256).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, scales * _half(blocks, 208), None


KEPT: dict[GGMLQuantizationType, tuple[Callable[[Bytes], Decoded], int, int]] = {  # reader, bits, elements of a group
    GGMLQuantizationType.Q8_0: (_q8_0, 8, 32),
    GGMLQuantizationType.Q4_0: (_q4_0, 4, 32),
    GGMLQuantizationType.Q4_1: (_q4_1, 4, 32),
    GGMLQuantizationType.Q4_K: (_q4_k, 4, 32),
    GGMLQuantizationType.Q6_K: (_q6_k, 8, 16),
}


def weight_of_blocks(rows: Bytes, kind: GGMLQuantizationType) -> QuantizedWeight:
    """A matrix of a type in KEPT. rows: [out_features, bytes of a row]. Products with it are made of integers."""
    read, bits, group_size = KEPT[kind]
    count = rows.shape[0]
    codes, scales, minimums = read(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    return QuantizedWeight(
        codes=torch.tensor(codes).view(count, -1),
        scales=torch.tensor(scales).view(count, -1),
        minimums=None if minimums is None else torch.tensor(minimums).view(count, -1),
        bits=bits,
        group_size=group_size,
        int8_activations=True,
    )
