"""Blocks of GGUF's quantised types as codes, scales and minimums: the numbers of the file, not rounded again.

A row of a tensor is a row of blocks. What a block holds is fixed by ggml (ggml-common.h); ``d`` and ``m`` are float16.
numpy works on one core and copies short runs slowly, so runs of codes are moved as items of their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from paceline.layers.file_tables import MIDDLE
from paceline.models.quantization.fp4 import EXPONENT_BIAS

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Codes = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
LOW, HIGH, SIX = np.uint8(15), np.uint8(4), np.uint8(63)  # the low half of a byte, where the high one begins, six bits
# What the 16 codes of IQ4_NL and IQ4_XS stand for, in ggml-common.h; as uint8 has int8's numbers.
UNEVEN = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8).view(np.uint8)


@dataclass(frozen=True)
class Decoded:
    """Blocks as FileTables has them: codes [blocks, codes of a block], ``zero`` above those of a weight, tables
    [blocks, groups of a block], steps [blocks, 1]."""

    codes: Bytes  # of 8 bits: as int8 has them
    zero: int
    scales: Codes | Halves | Floats
    lowest: Codes | Halves | None = None
    scale_steps: Halves | None = None
    lowest_steps: Halves | None = None


def _half(blocks: Bytes, at: int) -> Halves:
    """The float16 at byte ``at`` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


@cache
def run_of(width: int) -> np.dtype[np.void]:
    """An item of ``width`` bytes."""
    return np.dtype((np.void, width))


def _part(blocks: Bytes, low: int, high: int) -> Bytes:
    """Bytes [low, high) of each block, side by side."""
    return np.ascontiguousarray(blocks[:, low:high].view(run_of(high - low))).view(np.uint8)


def _by_turns(parts: Sequence[Bytes]) -> Bytes:
    """A run of each part, [..., width], one after the other: [..., len(parts) * width]."""
    width = parts[0].shape[-1]
    found = np.empty((*parts[0].shape[:-1], len(parts) * width), np.uint8)
    places = found.view(run_of(width))
    for i, part in enumerate(parts):
        places[..., i] = part.view(run_of(width))[..., 0]
    return found


def _low_then_high(packed: Bytes) -> Bytes:
    """The low halves of the bytes, then the high halves, along the last dimension."""
    return _by_turns((packed & LOW, packed >> HIGH))


def _bits(packed: Bytes, low: int, mask: int, at: int) -> Bytes:
    """The bits from ``low`` on that ``mask`` leaves, moved to bit ``at``."""
    moved = packed >> np.uint8(low - at) if low >= at else packed << np.uint8(at - low)
    moved &= np.uint8(mask << at)
    return moved


def _q8_0(blocks: Bytes) -> Decoded:
    """d, 32 codes."""
    return Decoded(blocks[:, 2:], 0, _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    """d, 32 codes: d * (code - 8)."""
    return Decoded(_low_then_high(_part(blocks, 2, 18)), MIDDLE, _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    """d, m, 32 codes: d * code + m."""
    return Decoded(_low_then_high(_part(blocks, 4, 20)), MIDDLE, _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bits of 4 bytes, the lowest first, as 16 or 0: [blocks, 32]."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _q5_0(blocks: Bytes) -> Decoded:
    """d, the fifth bits, the rest of 32 codes: d * (code - 16)."""
    return Decoded(_low_then_high(_part(blocks, 6, 22)) | _fifth_bits(blocks[:, 2:6]), 16, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    """d, m, the fifth bits, the rest of 32 codes: d * code + m."""
    codes = _low_then_high(_part(blocks, 8, 24)) | _fifth_bits(blocks[:, 4:8])
    return Decoded(codes, MIDDLE, _half(blocks, 0), _half(blocks, 2))


def _sixes(blocks: Bytes) -> tuple[Codes, Codes]:
    """8 scales and 8 minimums of 6 bits each in bytes 4 to 15, as Q4_K and Q5_K have them.

    The low 6 bits of the first 8 bytes are scales and minimums 0 to 3. The last 4 bytes hold the low halves of scales
    and minimums 4 to 7, whose high bits are the top bits of the first 8.
    """
    first, second, third = (_part(blocks, at, at + 4) for at in (4, 8, 12))
    scales = _by_turns((first & SIX, third & LOW | _bits(first, 6, 3, 4)))
    minimums = _by_turns((second & SIX, third >> HIGH | _bits(second, 6, 3, 4)))
    return scales.view(np.int8), minimums.view(np.int8)


def _q4_k(blocks: Bytes) -> Decoded:
    """d, m, `_sixes`, 256 codes: d * scale * code - m * minimum by groups of 32."""
    codes = _low_then_high(_part(blocks, 16, 144).reshape(-1, 4, 32)).reshape(-1, 256)
    return Decoded(codes, MIDDLE, *_sixes(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: Bytes) -> Decoded:
    """As Q4_K; before the codes, 32 bytes whose bit g is the fifth bit of a code of group g."""
    fifth = _part(blocks, 16, 48)
    codes = _low_then_high(_part(blocks, 48, 176).reshape(-1, 4, 32)).reshape(-1, 256)
    codes |= _by_turns([_bits(fifth, group, 1, 4) for group in range(8)])
    return Decoded(codes, MIDDLE, *_sixes(blocks), _half(blocks, 0), -_half(blocks, 2))


def _pairs(packed: Bytes, at: int = 0) -> Bytes:
    """Two bits of each byte at a time, the lowest first, of 64 bytes that are halved, at bit ``at``: [blocks, 256]."""
    halves = packed.reshape(-1, 2, 32)
    return _by_turns([_bits(halves, low, 3, at) for low in (0, 2, 4, 6)]).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Decoded:
    """16 bytes of a scale below a minimum, 256 codes of 2 bits, d, m: d * scale * code - m * minimum, groups of 16."""
    tables = _part(blocks, 0, 16)
    scales, minimums = (tables & LOW).view(np.int8), (tables >> HIGH).view(np.int8)
    return Decoded(_pairs(_part(blocks, 16, 80)), MIDDLE, scales, minimums, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: Bytes) -> Decoded:
    """256 third bits, the low 2 bits of as many codes, 16 scales of 6 bits, d: d * (scale - 32) * (code - 4).

    Bit i of the first 32 bytes belongs to run i of 32 codes. 8 bytes hold the low halves of the scales, 4 bytes the
    pairs of bits above them.
    """
    third, codes = _part(blocks, 0, 32), _pairs(_part(blocks, 32, 96))
    codes |= _by_turns([_bits(third, run, 1, 2) for run in range(8)])
    high = _part(blocks, 104, 108)
    scales = _low_then_high(_part(blocks, 96, 104)) | _by_turns([_bits(high, low, 3, 4) for low in (0, 2, 4, 6)])
    return Decoded(codes, 4, scales.view(np.int8) - np.int8(32), scale_steps=_half(blocks, 108))


def _q6_k(blocks: Bytes) -> Decoded:
    """256 codes of 6 bits (128 bytes of low halves, 64 of high pairs of bits), 16 scales of int8, d: groups of 16."""
    codes = _low_then_high(_part(blocks, 0, 128).reshape(-1, 2, 64)).reshape(-1, 256)
    codes |= _pairs(_part(blocks, 128, 192), 4)
    return Decoded(codes, 32, _part(blocks, 192, 208).view(np.int8), scale_steps=_half(blocks, 208))


def _iq4_nl(blocks: Bytes) -> Decoded:
    """d, 32 places in UNEVEN: d * UNEVEN[place]."""
    return Decoded(UNEVEN[_low_then_high(_part(blocks, 2, 18))], 0, _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Decoded:
    """d, 8 scales of 6 bits, 256 places in UNEVEN: d * (scale - 32) * UNEVEN[place], groups of 32.

    2 bytes hold the pairs of bits above the low halves of the scales, which are in 4 bytes after them.
    """
    low, high = _part(blocks, 4, 8), _part(blocks, 2, 4)
    scales = np.empty((len(blocks), 8), np.uint8)
    for group in range(8):
        pair = _bits(high[:, group // 4], 2 * (group % 4), 3, 4)
        scales[:, group] = _bits(low[:, group // 2], 4 * (group % 2), 15, 0) | pair
    places = _low_then_high(_part(blocks, 8, 136).reshape(-1, 8, 16)).reshape(-1, 256)
    return Decoded(UNEVEN[places], 0, scales.view(np.int8) - np.int8(32), scale_steps=_half(blocks, 0))


def _mxfp4(blocks: Bytes) -> Decoded:
    """An exponent, 32 codes of numbers in FLOAT4."""
    exponents = blocks[:, :1].astype(np.int32) - np.int32(EXPONENT_BIAS)
    return Decoded(_low_then_high(_part(blocks, 1, 17)), MIDDLE, np.ldexp(np.float32(1), exponents))


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
    GGMLQuantizationType.IQ4_NL: (_iq4_nl, 8, 32),
    GGMLQuantizationType.IQ4_XS: (_iq4_xs, 8, 32),
}
IN_CODES = KEPT | {GGMLQuantizationType.MXFP4: (_mxfp4, 4, 32)}  # types whose codes a weight keeps
