"""Triton kernels of the exact products: a row's bits depend on the row and the weights alone.

An output is a sum over k. The model cuts k into slabs (parallel/slabs.py), and a slab is cut into leaves of LEAF
elements. A leaf is one chain of matrix instructions from its first element to its last. The leaves of a slab are added
first to last, then the slabs by their tree, then the bias; the result is rounded once. The leaves follow from the width
of a slab alone, so that no number of rows, of outputs or of ranks changes a bit.

Leaves may be programs of their own or turns of one program's loop: both add the same float32 numbers in one order.
All tiles of a kind of weight use one instruction. Floats of 16 bits take Hopper's wgmma, of 64 rows, 128 columns and
16 elements of k. Codes take m16n8k16: their tile of 64 rows has 2 warps, because with 4 the compiler takes wgmma.
``tests/sampling/test_kernels_compile.py`` looks at the PTX. Float32 weights are multiplied without matrix
instructions, k after k.
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from paceline.layers.ops_triton import INTERPRETED, _rounded


@triton.jit
def _tile(tiles, ends, rows, BLOCK_M: tl.constexpr):
    """Matrix, first row and end of rows of this program. The matrix is below 0 where nothing is left to do."""
    at = tl.program_id(0)
    if tiles is not None:
        matrix = tl.load(tiles + 2 * at)
        first = tl.load(tiles + 2 * at + 1)
        last = tl.load(ends + tl.maximum(matrix, 0)).to(tl.int32)
    else:
        matrix = tl.program_id(2) * 0
        first = at * BLOCK_M
        last = rows
    return matrix, first, last


@triton.jit
def _signed(code):
    """A code of 4 bits, the low ones of a byte, as int8: two's complement."""
    return ((code & 15) ^ 8).to(tl.int8) - 8


@triton.jit
def _weights(weight, start, high, n_mask, EVEN: tl.constexpr, PACKED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Elements [BLOCK_K, BLOCK_N] of rows that begin at ``weight``, k of [start, start + BLOCK_K), 0 past ``high``.

    PACKED: a byte holds two codes, the first one low, and ``start`` is even. Behind an odd ``high`` one more code is
    what it is.
    """
    if PACKED:
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        mask = n_mask[:, None]
        if not EVEN:
            mask = mask & (2 * at < high)[None, :]
        both = tl.load(weight[:, None] + at[None, :], mask=mask, other=0)
        part = tl.trans(tl.interleave(_signed(both), _signed(both >> 4)))
    else:
        k = start + tl.arange(0, BLOCK_K)
        mask = n_mask[None, :]
        if not EVEN:
            mask = mask & (k < high)[:, None]
        part = tl.load(weight[None, :] + k[:, None], mask=mask, other=0.0)
    return part


@triton.jit
def _floats(codes, scale, minimum, start, k_mask, n_mask, dtype: tl.constexpr,
            GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Codes [BLOCK_K, BLOCK_N] -> floats as ``QuantizedWeight.dequantised`` has them, rounded to ``dtype`` once. Past
    the end of k they are whatever they are: x is 0 there."""
    wide = codes.to(tl.float32)
    if GROUPS == 1 or GROUP % BLOCK_K == 0:
        group = start // GROUP
        wide = wide * tl.load(scale + group, mask=n_mask, other=0.0)[None, :]
        if minimum is not None:
            wide = wide + tl.load(minimum + group, mask=n_mask, other=0.0)[None, :]
    else:
        groups = ((start + tl.arange(0, BLOCK_K)) // GROUP)[:, None]
        mask = k_mask & n_mask[None, :]
        wide = wide * tl.load(scale[None, :] + groups, mask=mask, other=0.0)
        if minimum is not None:
            wide = wide + tl.load(minimum[None, :] + groups, mask=mask, other=0.0)
    return _rounded(wide, dtype)


@triton.jit
def _leaf(x_rows, row_mask, weight, scale, minimum, n_mask, low, high, EVEN: tl.constexpr, PACKED: tl.constexpr,
          GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_K: tl.constexpr):  # fmt: skip
    """Sums over k of [low, high), float32 [BLOCK_M, BLOCK_N]. x_rows, weight, scale, minimum: where rows begin."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dtype: tl.constexpr = x_rows.dtype.element_ty
    for start in range(low, high, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = (k < high)[:, None]
        if EVEN:
            rows = tl.load(x_rows[:, None] + k[None, :], mask=row_mask[:, None], other=0.0)
        else:
            rows = tl.load(x_rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < high)[None, :], other=0.0)
        part = _weights(weight, start, high, n_mask, EVEN, PACKED, BLOCK_K)
        if scale is not None:
            part = _floats(part, scale, minimum, start, k_mask, n_mask, dtype, GROUP, GROUPS, BLOCK_K)
        if INTERPRETED:  # whose own products read the bits of bfloat16 as whole numbers
            total = tl.dot(rows.to(tl.float32), part.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(rows, part, total, input_precision="ieee")
    return total


# Long, because a kernel is one function, and a third of its lines are its arguments and what they mean.
def _product(
    x, weight, scales, minimums, bias, out, tiles, ends, sources, targets, rows, x_row, x_matrix, out_row, out_matrix,
    part_step,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SLAB: tl.constexpr, LEAF: tl.constexpr, PARTS: tl.constexpr,
    LEAF_EACH: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x [rows, WIDTH] times weight[matrix] [COLUMNS, WIDTH], of two codes a byte with PACKED.

    tiles, ends: see ``_tiles_kernel``; None where the third axis of the grid counts matrices. sources, targets: rows
    of x and of out by row; None: the row itself. PARTS > 1: a slab, or with LEAF_EACH a leaf, a program; float32 sums
    [PARTS, rows, COLUMNS], ``part_step`` apart, for ``_merge_kernel``.
    """
    matrix, first, last = _tile(tiles, ends, rows, BLOCK_M)
    if matrix < 0:
        return
    part = tl.program_id(2) % PARTS
    if tiles is None:
        matrix = tl.program_id(2) // PARTS
    row = first + tl.arange(0, BLOCK_M)
    row_mask = row < last
    source = row if sources is None else tl.load(sources + row, mask=row_mask, other=0)
    x_rows = x + matrix.to(tl.int64) * x_matrix + source.to(tl.int64) * x_row
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < COLUMNS
    column = matrix.to(tl.int64) * COLUMNS + n
    weights = weight + column * ((WIDTH + 1) // 2 if PACKED else WIDTH)
    scale = None if scales is None else scales + column * GROUPS
    minimum = None if minimums is None else minimums + column * GROUPS
    leaves: tl.constexpr = (SLAB + LEAF - 1) // LEAF
    even: tl.constexpr = SLAB % BLOCK_K == 0
    low = part * SLAB
    end = low + SLAB
    if LEAF_EACH:
        low = part // leaves * SLAB
        end = low + SLAB
        low += part % leaves * LEAF
    total = _leaf(x_rows, row_mask, weights, scale, minimum, n_mask, low, tl.minimum(low + LEAF, end), even,
                  PACKED, GROUP, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    if not LEAF_EACH:
        for leaf in range(1, leaves):
            start = low + leaf * LEAF
            total += _leaf(x_rows, row_mask, weights, scale, minimum, n_mask, start, tl.minimum(start + LEAF, end),
                           even, PACKED, GROUP, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    mask = row_mask[:, None] & n_mask[None, :]
    if PARTS > 1:
        kept = out + part.to(tl.int64) * part_step + row.to(tl.int64)[:, None] * COLUMNS + n[None, :]
        tl.store(kept, total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + column, mask=n_mask, other=0.0)[None, :]
        target = row if targets is None else tl.load(targets + row, mask=row_mask, other=0)
        kept = out + matrix.to(tl.int64) * out_matrix + target.to(tl.int64)[:, None] * out_row + n[None, :]
        tl.store(kept, _rounded(total, out.dtype.element_ty), mask=mask)


_product_kernel = triton.jit(_product, do_not_specialize=["rows"])


@triton.jit
def _slab_sum(parts, step, mask, LEAVES: tl.constexpr):
    """The leaves of one slab, first to last."""
    total = tl.load(parts, mask=mask, other=0.0)
    for leaf in tl.static_range(1, LEAVES):
        total += tl.load(parts + leaf * step, mask=mask, other=0.0)
    return total


@triton.jit
def _tree(parts, step, mask, COUNT: tl.constexpr, LEAVES: tl.constexpr):
    """The tree of parallel/slabs.py over COUNT slabs of LEAVES parts each, ``step`` elements apart."""
    if COUNT > 1:  # the compiler goes on behind an early return
        LEFT: tl.constexpr = (COUNT + 1) // 2
        right = parts + LEFT * LEAVES * step
        total = _tree(parts, step, mask, LEFT, LEAVES) + _tree(right, step, mask, COUNT - LEFT, LEAVES)
    else:
        total = _slab_sum(parts, step, mask, LEAVES)
    return total


@triton.jit
def _merge_kernel(
    parts, step, bias, out, COLUMNS: tl.constexpr, COUNT: tl.constexpr, LEAVES: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK of the ``step`` elements of out [rows, COLUMNS], contiguous, as each part is."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < step
    total = _tree(parts + at, step, mask, COUNT, LEAVES)
    if bias is not None:
        total += tl.load(bias + at % COLUMNS, mask=mask, other=0.0)
    tl.store(out + at, _rounded(total, out.dtype.element_ty), mask=mask)


@triton.jit
def _tiles_kernel(ends, tiles, MATRICES: tl.constexpr, BLOCK_M: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of rows that lie together by matrix. ends: int32 [MATRICES], past each one's last row.

    tiles: int32 [?, 2], matrix and first row of each tile, -1 and 0 past the last one. A program writes BLOCK of them.
    COUNT: a power of two, at least MATRICES.
    """
    matrix = tl.arange(0, COUNT)
    mask = matrix < MATRICES
    end = tl.load(ends + matrix, mask=mask, other=0).to(tl.int32)
    begin = tl.load(ends + matrix - 1, mask=mask & (matrix > 0), other=0).to(tl.int32)
    count = tl.where(mask, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    past = tl.cumsum(count, axis=0)  # tiles up to this matrix's last
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (past[None, :] > at[:, None]) & ((past - count)[None, :] <= at[:, None]) & mask[None, :]
    found = tl.sum(mine.to(tl.int32), axis=1) > 0
    first = begin[None, :] + (at[:, None] - (past - count)[None, :]) * BLOCK_M
    tl.store(tiles + 2 * at, tl.where(found, tl.sum(tl.where(mine, matrix[None, :], 0), axis=1), -1))
    tl.store(tiles + 2 * at + 1, tl.sum(tl.where(mine, first, 0), axis=1))
