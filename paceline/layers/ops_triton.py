"""Triton kernels of ``ops``: each operation is one launch, where torch takes five to twenty.

All arithmetic is float32 and rounds where the ``*_reference`` functions round, without fused multiply-adds. Rope, the
writes to the pool and ``residual += x`` therefore equal them bit for bit. A norm's sum of squares is added up in
another order than torch's, and silu's exponential is another library's on the CPU: both differ in float32's last bits,
which moves a result by one rounding step of its dtype now and then.

A row is computed by one program, over a block, with a number of warps and in an order of summation that follow from
its width and dtype alone. So its bits depend neither on the number of rows nor on where they lie: addresses are told
to the compiler as a width promises them (EVEN), never as a call happens to have them.
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from paceline.triton_support import EXACT, next_power_of_2, on_device_of

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # as Triton read it
VECTOR_BYTES = 16  # that a thread moves at once
SILU_BLOCK = 1024
ROPE_BLOCK = 512  # pairs that one program turns
ELEMENTS_PER_THREAD = 16


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 to ``dtype``, to the nearest, ties to even; the interpreter's own cast to bfloat16 cuts off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits | 0x400000)  # a NaN stays one
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _exp(x):
    """The same as CUDA's expf, which torch calls; Triton's own is coarser."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def _normed(wide, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """A row in float32, zeros past its width -> the normed row, rounded to ``dtype``."""
    mean = tl.div_rn(tl.sum(wide * wide, axis=0), WIDTH * 1.0)
    return _rounded(wide * tl.rsqrt(mean + eps), dtype)


def _rms_norm(
    x, residual, weight, out, x_row, x_head, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of x [rows, HEADS, WIDTH]; strides in units of EVEN. ADD: into the residual, whose new row is normed."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    source = x + (at // HEADS * x_row + at % HEADS * x_head) * EVEN + column
    dtype = x.dtype.element_ty
    row = tl.load(source, mask=mask, other=0.0)
    if ADD:
        kept = residual + at * WIDTH + column
        row = _rounded(row.to(tl.float32) + tl.load(kept, mask=mask, other=0.0).to(tl.float32), dtype)
        tl.store(kept, row, mask=mask)
    normed = _normed(row.to(tl.float32), eps, WIDTH, weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at * WIDTH + column, _rounded(normed * scale, out.dtype.element_ty), mask=mask)


STRIDES = ["x_row", "x_head"]
_rms_norm_kernel = triton.jit(_rms_norm, do_not_specialize_on_alignment=STRIDES)  # for addresses that EVEN promises
_rms_norm_anywhere_kernel = triton.jit(
    _rms_norm, do_not_specialize_on_alignment=["x", "residual", "weight", "out", *STRIDES]
)


@triton.jit
def _silu_mul_kernel(gate_up, gate_up_row, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    source = gate_up + row * gate_up_row + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    product = tl.div_rn(gate, 1.0 + _exp(-gate)) * up
    tl.store(out + row * WIDTH + column, _rounded(product, out.dtype.element_ty), mask=mask)


@triton.jit
def _branch(slab, step, mask, COUNT: tl.constexpr):
    """The tree of parallel/slabs.py over COUNT slabs, ``step`` elements apart."""
    if COUNT > 1:  # the compiler goes on behind an early return
        LEFT: tl.constexpr = (COUNT + 1) // 2
        total = _branch(slab, step, mask, LEFT) + _branch(slab + LEFT * step, step, mask, COUNT - LEFT)
    else:
        total = tl.load(slab, mask=mask, other=0.0)
    return total


@triton.jit
def _add_slabs_kernel(slabs, step, bias, out, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    total = _branch(slabs + at, step, mask, COUNT)
    if bias is not None:
        total += tl.load(bias + column, mask=mask, other=0.0)
    tl.store(out + at, _rounded(total, out.dtype.element_ty), mask=mask)


@triton.jit
def _angles(table, table_row, position, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Cosine and sine of a position, float32 [1, PAIRS] each."""
    pair = tl.arange(0, PAIRS)
    mask = pair < WIDTH // 2
    entry = table + position.to(tl.int64) * table_row + pair
    cos = tl.load(entry, mask=mask, other=0.0)
    sin = tl.load(entry + WIDTH // 2, mask=mask, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _turn(source, dest, mask, cos, sin, WIDTH: tl.constexpr):
    """Rotate pairs (i, i + WIDTH / 2) of some rows. source, dest, mask: [rows, PAIRS], of the first halves."""
    dtype = source.dtype.element_ty
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    kept = dest.dtype.element_ty
    tl.store(dest, _rounded(_rounded(a * cos - b * sin, dtype).to(tl.float32), kept), mask=mask)
    tl.store(dest + WIDTH // 2, _rounded(_rounded(b * cos + a * sin, dtype).to(tl.float32), kept), mask=mask)


@triton.jit
def _copy(source, dest, mask):
    tl.store(dest, _rounded(tl.load(source, mask=mask, other=0.0).to(tl.float32), dest.dtype.element_ty), mask=mask)


ROWS_OF_A_BATCH = ["positions", "slots"]  # where they lie follows from the number of rows: no kernel is to depend on it


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_A_BATCH)
def _rope_write_kernel(
    query, key, value, table, positions, slots, out, pages, query_row, query_head, key_row, key_head, value_row,
    value_head, table_row, page_stride, part_stride, slot_stride, page_size, num_slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one row: of the query, or of key and value."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    pair = tl.arange(0, PAIRS)[None, :]
    cos, sin = _angles(table, table_row, tl.load(positions + row), DIM, PAIRS)
    if group < query_groups:
        head = (group * GROUP + tl.arange(0, GROUP))[:, None]
        mask = (head < HEADS) & (pair < DIM // 2)
        dest = out + (row * HEADS + head) * DIM + pair
        _turn(query + row * query_row + head * query_head + pair, dest, mask, cos, sin, DIM)
    else:
        head = ((group - query_groups) * GROUP + tl.arange(0, GROUP))[:, None]
        mask = (head < KV_HEADS) & (pair < DIM // 2)
        slot = tl.load(slots + row).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            keys = pages + slot // page_size * page_stride + slot % page_size * slot_stride + head * DIM + pair
            _turn(key + row * key_row + head * key_head + pair, keys, mask, cos, sin, DIM)
            values = value + row * value_row + head * value_head + pair
            _copy(values, keys + part_stride, mask)
            _copy(values + DIM // 2, keys + part_stride + DIM // 2, mask)


def _latent_write(
    query, latent, norm, table, positions, slots, out, pages, query_row, query_head, latent_row, table_row,
    page_stride, slot_stride, page_size, num_slots, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The latent of one row (group 0), or GROUP heads of its query. Strides of latent and pages in units of EVEN."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, PAIRS)[None, :]
    cos, sin = _angles(table, table_row, tl.load(positions + row), ROPE, PAIRS)
    if group == 0:
        slot = tl.load(slots + row).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            dest = pages + (slot // page_size * page_stride + slot % page_size * slot_stride) * EVEN
            source = latent + row * latent_row * EVEN
            column = tl.arange(0, BLOCK)
            mask = column < RANK
            wide = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
            scale = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
            dtype = latent.dtype.element_ty
            normed = _rounded(_normed(wide, eps, RANK, dtype).to(tl.float32) * scale, dtype)
            tl.store(dest + column, _rounded(normed.to(tl.float32), pages.dtype.element_ty), mask=mask)
            _turn(source + RANK + pair, dest + RANK + pair, pair < ROPE // 2, cos, sin, ROPE)
    else:
        head = ((group - 1) * GROUP + tl.arange(0, GROUP))[:, None]
        mask = (head < HEADS) & (pair < ROPE // 2)
        dest = out + (row * HEADS + head) * (RANK + ROPE) + RANK + pair
        _turn(query + row * query_row + head * query_head + pair, dest, mask, cos, sin, ROPE)


LATENT_STRIDES = ["latent_row", "page_stride", "slot_stride"]
_latent_write_kernel = triton.jit(_latent_write, do_not_specialize_on_alignment=[*ROWS_OF_A_BATCH, *LATENT_STRIDES])
_latent_write_anywhere_kernel = triton.jit(
    _latent_write, do_not_specialize_on_alignment=["latent", "norm", "pages", *ROWS_OF_A_BATCH, *LATENT_STRIDES]
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``ops.rms_norm``. x: [..., n], rows of up to three dimensions may lie apart."""
    even = _even(x.shape[-1], x.dtype)
    x = _placed(x, even)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, eps, out, even)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``ops.add_rms_norm``. x: [T, n]; residual: [T, n], contiguous, written in place."""
    even = _even(x.shape[-1], x.dtype)
    kept = _placed(residual, even, contiguous=True)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(_placed(x, even), kept, weight, eps, out, even)
    if kept is not residual:
        residual.copy_(kept)
    return out


def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor, even: int
) -> None:
    """x: placed. residual: placed and contiguous."""
    width = x.shape[-1]
    if not x.numel():
        return
    x = x if 2 <= x.dim() <= 3 else x.reshape(-1, width)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    kernel = _rms_norm_kernel if even > 1 else _rms_norm_anywhere_kernel
    block = next_power_of_2(width)
    with on_device_of(x):
        kernel[(x.numel() // width,)](
            x, residual, _placed(weight, even), out, x.stride(0) // even, head_stride // even, eps,
            HEADS=heads, WIDTH=width, EVEN=even, ADD=residual is not None, BLOCK=block, num_warps=_warps(block),
            **EXACT,
        )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``ops.silu_mul``. gate_up: [T, 2n]; rows may lie apart."""
    gate_up = _placed(gate_up, 1)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if not out.numel():
        return out
    block = min(SILU_BLOCK, next_power_of_2(width))
    with on_device_of(gate_up):
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](
            gate_up, gate_up.stride(0), out, WIDTH=width, BLOCK=block, **EXACT
        )
    return out


def add_slabs(slabs: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The tree over slabs, the bias, one cast. slabs: float32 [slabs, T, n], contiguous; bias: float32 [n]."""
    count, rows, width = slabs.shape
    out = torch.empty(rows, width, dtype=dtype, device=slabs.device)
    if not out.numel():
        return out
    block = min(SILU_BLOCK, next_power_of_2(width))
    with on_device_of(slabs):
        _add_slabs_kernel[(rows, triton.cdiv(width, block))](
            slabs, slabs.stride(0), bias, out, WIDTH=width, COUNT=count, BLOCK=block, **EXACT
        )
    return out


def rope_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """``ops.rope_write``. Heads may lie apart too; a slot outside of ``pages`` is left out."""
    query, key, value = (_placed(x, 1) for x in (query, key, value))
    rows, heads, dim = query.shape
    num_pages, _, page_size, kv_heads, _ = pages.shape
    out = query.new_empty(rows, heads, dim)
    if not rows:
        return out
    pairs = next_power_of_2(dim // 2)
    group = min(max(ROPE_BLOCK // pairs, 1), next_power_of_2(heads))
    with on_device_of(query):
        _rope_write_kernel[(rows, triton.cdiv(heads, group) + triton.cdiv(kv_heads, group))](
            query, key, value, table, positions, slots, out, pages, query.stride(0), query.stride(1), key.stride(0),
            key.stride(1), value.stride(0), value.stride(1), table.stride(0), pages.stride(0), pages.stride(1),
            pages.stride(2), page_size, num_pages * page_size,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAIRS=pairs, GROUP=group, **EXACT,
        )  # fmt: skip
    return out


def latent_write(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """``ops.latent_write``; a slot outside of ``pages`` is left out."""
    rows, heads, rope_dim = query.shape
    if not rows:
        return
    rank = norm.shape[0]
    # A row of the pool must begin and hold its rope part at a multiple too, and a pool is not copied.
    even = min(_even(rank, latent.dtype), _even(rank + rope_dim, latent.dtype))
    even = even if _is_placed(pages, even) else 1
    query, latent, norm = _placed(query, 1), _placed(latent, even), _placed(norm, even)
    kernel = _latent_write_kernel if even > 1 else _latent_write_anywhere_kernel
    num_pages, page_size, _ = pages.shape
    pairs, block = next_power_of_2(rope_dim // 2), next_power_of_2(rank)
    group = min(max(ROPE_BLOCK // pairs, 1), next_power_of_2(heads))
    with on_device_of(query):
        kernel[(rows, 1 + triton.cdiv(heads, group))](
            query, latent, norm, table, positions, slots, out, pages, query.stride(0), query.stride(1),
            latent.stride(0) // even, table.stride(0), pages.stride(0) // even, pages.stride(1) // even, page_size,
            num_pages * page_size, eps,
            HEADS=heads, RANK=rank, ROPE=rope_dim, EVEN=even, BLOCK=block, PAIRS=pairs, GROUP=group,
            num_warps=_warps(max(block, group * pairs)), **EXACT,
        )  # fmt: skip


def _even(width: int, dtype: torch.dtype) -> int:
    """Elements that a thread may move at once in every row of this width."""
    return VECTOR_BYTES // dtype.itemsize if width * dtype.itemsize % VECTOR_BYTES == 0 else 1


def _placed(x: torch.Tensor, even: int, contiguous: bool = False) -> torch.Tensor:
    """x, or a contiguous copy of it where x is not placed as the kernels want it."""
    good = _is_placed(x, even) and (x.is_contiguous() or not contiguous)
    return x if good else x.clone(memory_format=torch.contiguous_format)


def _is_placed(x: torch.Tensor, even: int) -> bool:
    """Whether a row's elements lie together, and rows, if ``even`` is not 1, at multiples of VECTOR_BYTES."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    placed = x.stride(-1) == 1 and not any(stride % even for stride in strides)
    return placed and (even == 1 or x.data_ptr() % VECTOR_BYTES == 0)


def _warps(block: int) -> int:
    return min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 16)
