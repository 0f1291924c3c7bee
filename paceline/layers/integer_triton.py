"""Triton kernels of products of integers, bit for bit those of ``quantized_reference``.

Sums within a group are sums of integers, so their order is nothing. Groups of a row are added first to last, each
product rounded before it is added.
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from paceline.layers.ops_triton import _rounded
from paceline.layers.products_triton import _tile, _weights

TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number below 2^22 that is added to it is rounded, ties to even


@triton.jit
def _round_rows_kernel(
    x, x_row, codes, scales, sums, least, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``round_rows`` of one group of one row. sums: float32 [rows, GROUPS], of a group's codes; None: not wanted."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    column = group * GROUP + at
    mask = (at < GROUP) & (column < WIDTH)
    wide = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(wide) < float("inf")  # a NaN is not
    wide = tl.where(finite, wide, 0.0)
    broken = tl.max(tl.where(finite, 0, 1), axis=0)
    peak = tl.max(tl.abs(wide), axis=0)
    peak = tl.where(broken > 0, 0.0, peak)
    peak = tl.where(peak >= least, peak, 0.0)
    factor = tl.where(peak > 0.0, tl.div_rn(127.0, tl.where(peak > 0.0, peak, 1.0)), 0.0)
    whole = (wide * factor + TO_WHOLE) - TO_WHOLE
    tl.store(codes + row * WIDTH + column, whole.to(tl.int8), mask=mask)
    tl.store(scales + row * GROUPS + group, tl.where(broken > 0, float("nan"), tl.div_rn(peak, 127.0)))
    if sums is not None:
        tl.store(sums + row * GROUPS + group, tl.sum(whole.to(tl.int32), axis=0).to(tl.float32))


@triton.jit
def _step(total, x_rows, row_mask, weight, n_mask, start, high, EVEN: tl.constexpr, PACKED: tl.constexpr,
          BLOCK_K: tl.constexpr):  # fmt: skip
    """Adds products of codes over k of [start, start + BLOCK_K), up to ``high``. total: int32 [rows, columns]."""
    k = start + tl.arange(0, BLOCK_K)
    if EVEN:
        rows = tl.load(x_rows[:, None] + k[None, :], mask=row_mask[:, None], other=0)
    else:
        rows = tl.load(x_rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < high)[None, :], other=0)
    part = _weights(weight, start, high, n_mask, EVEN, PACKED, BLOCK_K)
    return tl.dot(rows, part, total, out_dtype=tl.int32)


@triton.jit
def _dots(x_rows, row_mask, weight, n_mask, low, high, EVEN: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Sums of products of codes over one group, k of [low, high), float32 [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    if GROUP <= BLOCK_K:  # no inner loop, so that the loop over groups loads ahead
        total = _step(total, x_rows, row_mask, weight, n_mask, low, high, EVEN, PACKED, BLOCK_K)
    else:
        for start in range(low, high, BLOCK_K):
            total = _step(total, x_rows, row_mask, weight, n_mask, start, high, EVEN, PACKED, BLOCK_K)
    return total.to(tl.float32)


def _integer(
    codes, x_scales, sums, weight, scales, minimums, bias, out, tiles, ends, sources, targets, rows, out_row,
    out_slab,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SLAB_GROUPS: tl.constexpr,
    ROW_SCALES: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of rounded rows times weight[matrix]; see ``_product`` of products_triton for what is named alike.

    GROUP: elements of a row that were rounded together. ROW_SCALES: the weight has one scale a row. The third axis of
    the grid counts slabs of SLAB_GROUPS groups, whose sums lie ``out_slab`` apart.
    """
    matrix, first, last = _tile(tiles, ends, rows, BLOCK_M)
    if matrix < 0:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_mask = row < last
    source = (row if sources is None else tl.load(sources + row, mask=row_mask, other=0)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < COLUMNS
    column = matrix.to(tl.int64) * COLUMNS + n
    even: tl.constexpr = (GROUP % BLOCK_K == 0) and (WIDTH % GROUP == 0)
    weights = weight + column * ((WIDTH + 1) // 2 if PACKED else WIDTH)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slab = tl.program_id(2)
    for group in range(slab * SLAB_GROUPS, (slab + 1) * SLAB_GROUPS):
        low = group * GROUP
        dots = _dots(codes + source * WIDTH, row_mask, weights, n_mask, low, tl.minimum(low + GROUP, WIDTH), even,
                     PACKED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        own = tl.load(x_scales + source * GROUPS + group, mask=row_mask, other=0.0)
        if not ROW_SCALES:
            dots = dots * tl.load(scales + column * GROUPS + group, mask=n_mask, other=0.0)[None, :]
        total = total + dots * own[:, None]
        if minimums is not None:
            least = tl.load(minimums + column * GROUPS + group, mask=n_mask, other=0.0)
            added = tl.load(sums + source * GROUPS + group, mask=row_mask, other=0.0) * own
            total = total + least[None, :] * added[:, None]
    if ROW_SCALES:
        total = total * tl.load(scales + column, mask=n_mask, other=0.0)[None, :]
    if bias is not None:
        total = total + tl.load(bias + column, mask=n_mask, other=0.0)[None, :]
    target = row if targets is None else tl.load(targets + row, mask=row_mask, other=0)
    kept = out + slab.to(tl.int64) * out_slab + target.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(kept, _rounded(total, out.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


_integer_kernel = triton.jit(_integer, do_not_specialize=["rows"])
