"""Triton kernels of ``device_pages``."""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kvcache.unit_table import UnitTable
from paceline.triton_support import EXACT, next_power_of_2, on_device_of

TILE = 2048  # units that one program moves at a time
ROW = 256  # of them, at most this many of one row of K, V or latent


@triton.jit(do_not_specialize=["num_tokens", "first_layer"])  # or it compiles anew for 1, and for a multiple of 16
def _move_kernel(
    table, first_layer, pool, slots, flat, num_tokens, page_size, num_slots,
    WORDS: tl.constexpr, TO_FLAT: tl.constexpr, TOKENS: tl.constexpr, UNITS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one layer, between the pool and ``flat``, canonical order. EVEN: how many units every width and
    address is a multiple of, so that a thread may move so many at once."""
    entry = table + (first_layer + tl.program_id(1)) * WORDS
    pages = pool + tl.multiple_of(tl.load(entry), EVEN)
    width = tl.multiple_of(tl.load(entry + 1).to(tl.int32), EVEN)
    parts = tl.load(entry + 2).to(tl.int32)
    before = tl.multiple_of(tl.load(entry + 3) - tl.load(table + first_layer * WORDS + 3), EVEN)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + at, mask=at < num_tokens, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    # A page of K lies before each page of V.
    paged = pages + ((slot + (parts - 1) * (slot // page_size) * page_size) * width)[:, None]
    linear = flat + (before * num_tokens + at.to(tl.int64) * parts * width)[:, None]
    for part in range(0, parts):
        for first in range(0, width, UNITS):
            unit = first + tl.arange(0, UNITS)
            mask = inside[:, None] & (unit < width)[None, :]
            in_pages = paged + (part * page_size * width + unit)[None, :]
            in_flat = linear + (part * width + unit)[None, :]
            if TO_FLAT:
                tl.store(in_flat, tl.load(in_pages, mask=mask), mask=mask)
            else:
                tl.store(in_pages, tl.load(in_flat, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["length_stride", "path_stride"])
def _compact_kernel(
    table, first_layer, pool, slots, starts, lengths, length_stride, paths, path_stride, page_size,
    WORDS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """UNITS units of one layer of one sequence: the i-th accepted node's go to node i + 1's slot.

    A path climbs by at least one node a step, so a slot is read no later than in the step that overwrites it; the
    barrier holds all threads' reads of a step before its writes.
    """
    seq = tl.program_id(0)
    entry = table + (first_layer + tl.program_id(1)) * WORDS
    pages = pool + tl.load(entry)
    width = tl.load(entry + 1)
    parts = tl.load(entry + 2)
    unit = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
    within = unit + (unit >= width).to(tl.int64) * (page_size - 1) * width
    mask = unit < width * parts
    slots += tl.load(starts + seq)
    for i in range(0, tl.load(lengths + seq * length_stride)):
        node = tl.load(paths + seq * path_stride + i)
        source = tl.load(slots + node).to(tl.int64)
        dest = tl.load(slots + i + 1).to(tl.int64)
        if source != dest:
            from_unit = (source + (parts - 1) * (source // page_size) * page_size) * width
            to_unit = (dest + (parts - 1) * (dest // page_size) * page_size) * width
            values = tl.load(pages + from_unit + within, mask=mask)
            tl.debug_barrier()
            tl.store(pages + to_unit + within, values, mask=mask)


def move(pool: UnitTable, layers: range, slots: torch.Tensor, flat: torch.Tensor, to_flat: bool) -> None:
    """Gather or scatter. slots: int32 or int64 [T]; flat: [units of layers * T] of the pool's unit."""
    if not layers or not slots.shape[0]:
        return
    units = min(ROW, next_power_of_2(max(pool.widths[layer] for layer in layers)))
    tokens = TILE // units
    with on_device_of(flat):
        _move_kernel[(triton.cdiv(slots.shape[0], tokens), len(layers))](
            pool.table, layers.start, pool.first, slots, flat, slots.shape[0], pool.page_size, pool.num_slots,
            WORDS=pool.table.shape[1], TO_FLAT=to_flat, TOKENS=tokens, UNITS=units, EVEN=pool.even, **EXACT,
        )  # fmt: skip


def compact(
    pool: UnitTable,
    layers: range,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    paths: torch.Tensor,
) -> None:
    """``KvPool.keep_paths`` of tensors on the device."""
    num_seqs = lengths.shape[0]
    if not layers or not num_seqs:
        return
    widest = max(pool.row_units[layer] for layer in layers)
    units = min(TILE, next_power_of_2(widest))
    with on_device_of(slots):
        _compact_kernel[(num_seqs, len(layers), triton.cdiv(widest, units))](
            pool.table, layers.start, pool.first, slots, starts, lengths, lengths.stride(0), paths, paths.stride(0),
            pool.page_size, WORDS=pool.table.shape[1], UNITS=units, **EXACT,
        )  # fmt: skip
