"""Triton kernels of ``placed``."""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.attention.triton_kernels import COLUMNS, LENGTH, PREFIX
from paceline.triton_support import next_power_of_2, on_device_of

PAGES = 256  # that one program copies at a time


@triton.jit
def _rows_kernel(
    tables, width, which, ends, counts, positions, slots, rows, page_size, scratch_slot, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of one segment."""
    segment = tl.program_id(0)
    table = tables + tl.load(which + segment) * width
    end, count = tl.load(ends + segment), tl.load(counts + segment)
    row = tl.arange(0, ROWS)
    real = (row >= rows - count) & (row < rows)
    at = tl.where(real, end - rows + row, 0)
    page = tl.load(table + at // page_size, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, page * page_size + at % page_size, scratch_slot)
    tl.store(positions + segment * rows + row, at, mask=row < rows)
    tl.store(slots + segment * rows + row, slot, mask=row < rows)


@triton.jit
def _pages_kernel(
    tables, width, which, ends, indptr, indices, last_page_len, segments, page_size,
    SEGMENTS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """The pages of one segment. Every program adds up the pages of the segments before its own."""
    segment = tl.program_id(0)
    each = tl.arange(0, SEGMENTS)
    of_each = (tl.load(ends + each, mask=each < segments, other=0) + page_size - 1) // page_size
    before = tl.sum(tl.where(each < segment, of_each, 0), axis=0)
    end = tl.load(ends + segment)
    count = (end + page_size - 1) // page_size
    tl.store(indptr + segment + 1, (before + count).to(tl.int32))
    tl.store(last_page_len + segment, ((end - 1) % page_size + 1).to(tl.int32))
    table = tables + tl.load(which + segment) * width
    for first in range(0, count, PAGES):
        page = first + tl.arange(0, PAGES)
        tl.store(indices + before + page, tl.load(table + page, mask=page < count), mask=page < count)


@triton.jit
def _reads_kernel(ends, which, reads, rows, num_rows, width, ROWS: tl.constexpr):
    """What the rows of one segment read: ``triton_plan.Reads.rows`` over the tables themselves, without tails."""
    segment = tl.program_id(0)
    row = tl.arange(0, ROWS)
    seen = tl.maximum(tl.load(ends + segment) - rows + row + 1, 0).to(tl.int32)
    columns = tl.zeros([ROWS], tl.int32) + (tl.load(which + segment) * width).to(tl.int32)
    at, real = reads + segment * rows + row, row < rows
    tl.store(at + PREFIX * num_rows, seen, mask=real)
    tl.store(at + LENGTH * num_rows, seen, mask=real)
    tl.store(at + COLUMNS * num_rows, columns, mask=real)


def place_rows(
    tables: torch.Tensor,
    which: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    scratch_slot: int,
) -> None:
    """``PlacedBatch.positions_and_slots``."""
    segments = which.shape[0]
    rows = slots.shape[0] // segments
    with on_device_of(slots):
        _rows_kernel[(segments,)](
            tables, tables.stride(0), which, ends, counts, positions, slots, rows, page_size, scratch_slot,
            ROWS=next_power_of_2(rows),
        )  # fmt: skip


def list_pages(
    tables: torch.Tensor,
    which: torch.Tensor,
    ends: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
) -> None:
    """``PlacedBatch.page_lists``; ``indptr[0]`` is 0 already."""
    segments = which.shape[0]
    with on_device_of(indices):
        _pages_kernel[(segments,)](
            tables, tables.stride(0), which, ends, indptr, indices, last_page_len, segments, page_size,
            SEGMENTS=next_power_of_2(segments), PAGES=PAGES,
        )  # fmt: skip


def place_reads(which: torch.Tensor, ends: torch.Tensor, reads: torch.Tensor, width: int) -> None:
    """Fill ``reads``, int32 [4, S * N], for segments whose rows see their own positions. which, ends: int64 [S]. width:
    pages of a table."""
    segments, num_rows = which.shape[0], reads.shape[1]
    with on_device_of(reads):
        _reads_kernel[(segments,)](
            ends, which, reads, num_rows // segments, num_rows, width, ROWS=next_power_of_2(num_rows // segments),
        )  # fmt: skip
