"""What the sampler's Triton kernels share: the noise, an order of float32 values as integers, sums over chunks."""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def noise_bits(ids, key0, key1):
    """``noise.noise_bits_rows``: 32 bits for each id. ids: int32; keys: uint32."""
    x = ids.to(tl.uint32) + key0
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    x = (x ^ (x >> 16)) ^ key1
    x = (x ^ (x >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def exponential(bits):
    """-log((bits + 0.5) / 2**32), float64."""
    return -tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def sort_key(values):
    """int32 that sorts as the float32 does; both zeros have one key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 of a ``sort_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def softmax_temperature(pointer):
    """float32; 1 for greedy rows."""
    temperature = tl.load(pointer).to(tl.float32)
    return tl.where(temperature > 0.0, tl.maximum(temperature, 1e-30), 1.0)


@triton.jit
def row_top(tops, chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row, of its chunks'."""
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(tops + at, mask=at < chunks, other=-float("inf")), axis=0)
