"""Linear batches of a fixed shape as a device keeps them: page tables stay there, and a forward is told numbers alone.

A step of a running sequence changes how many positions it has, and now and then its pages. So the page tables of the
sequences that ran last lie on the device (``ResidentTables``), and a batch names, for each of its segments, the row of
its table, how many positions it sees and how many of its rows are real. What kernels read is worked out from that on
the device, in captured work: positions, write slots, page lists.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.attention.base import Segment, StaticPlan, StaticShape
from paceline.attention.padding import Scratch
from paceline.layers.upload import Int32, Int64, staged
from paceline.triton_support import runs_triton

SCRATCH_ROW = 0  # of the tables: the scratch page alone


@dataclass(frozen=True)
class PlacedBatch:
    """S segments of N rows each, the real ones last. Device memory that stays; nothing of it is known to the host."""

    tables: torch.Tensor  # int32 [held sequences, pages]: the pages of a sequence, in order of position
    which: torch.Tensor  # int64 [S], row of ``tables``
    ends: torch.Tensor  # int64 [S], positions that the last row sees, at least 1
    counts: torch.Tensor  # int64 [S], real rows
    rows: int  # N
    scratch: Scratch

    def positions_and_slots(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill both, int64 [S * N]. Padding stands at position 0 and writes the scratch page."""
        page_size, slot = self.scratch.page_size, self.scratch.slot
        if runs_triton(self.which.device):
            from paceline.attention.placed_triton import place_rows

            place_rows(self.tables, self.which, self.ends, self.counts, positions, slots, page_size, slot)
            return
        row = torch.arange(self.rows, device=self.which.device)
        real = row >= self.rows - self.counts.unsqueeze(1)
        at = torch.where(real, self.ends.unsqueeze(1) - self.rows + row, 0)
        pages = self.tables[self.which.unsqueeze(1), at // page_size]
        positions.copy_(at.view(-1))
        slots.copy_(torch.where(real, pages * page_size + at % page_size, slot).view(-1))

    def page_lists(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        """Fill FlashInfer's page lists, int32: indptr [S + 1], indices [at least all pages], last_page_len [S]."""
        page_size = self.scratch.page_size
        if runs_triton(self.which.device):
            from paceline.attention.placed_triton import list_pages

            list_pages(self.tables, self.which, self.ends, indptr, indices, last_page_len, page_size)
            return
        pages = (self.ends + page_size - 1) // page_size
        after = pages.cumsum(0)
        indptr[1:] = after
        last_page_len.copy_((self.ends - 1) % page_size + 1)
        at = torch.arange(indices.shape[0], device=indices.device)
        segment = torch.searchsorted(after, at, right=True).clamp(max=after.shape[0] - 1)
        column = (at - (after - pages)[segment]).clamp(max=self.tables.shape[1] - 1)
        indices.copy_(self.tables[self.which[segment], column])


class PlacedPlan(StaticPlan):
    """A static plan that can also read its batch from a ``PlacedBatch``; batches of trees are for ``fill`` alone."""

    @abstractmethod
    def derive(self, batch: PlacedBatch) -> None:
        """Work the plan's arrays out from ``batch``. It is called first in captured work: it launches, and no more."""

    def expect(self, ends: Int64) -> None:
        """Outside of any capture, before ``derive`` runs: what the next batch's ``ends`` will be, [S], in case that the
        host has to plan by them."""


@dataclass
class _Held:
    slots: torch.Tensor  # keeps the memory, so that nobody else's has the same address
    row: int
    num_tokens: int  # that the row holds pages of


class ResidentTables:
    """Page tables on the device, one for each sequence that ran lately. The sequence that ran longest ago makes room.

    A sequence is known by the memory of its position-to-slot list, in which a slot that was named once stays as it is
    (``PageTable``).
    """

    def __init__(self, sequences: int, max_len: int, scratch: Scratch, device: torch.device) -> None:
        """sequences: of the largest batch. max_len: positions of a sequence at most."""
        self.scratch, self.max_len = scratch, max_len
        pages = -(-max_len // scratch.page_size)
        self.tables = torch.zeros(sequences + 1, pages, dtype=torch.int32, device=device)
        self.tables[SCRATCH_ROW, 0] = scratch.page
        self._held: dict[int, _Held] = {}
        self._keys: list[int | None] = [None] * (sequences + 1)  # of each row
        self._used = np.zeros(sequences + 1, dtype=np.int64)  # when each row was asked for last
        self._used[SCRATCH_ROW] = np.iinfo(np.int64).max
        self._now = 0

    def rows_of(self, slots: Sequence[torch.Tensor], ends: Sequence[int]) -> Int64:
        """Rows of the tables for position-to-slot lists that are at least ``ends`` long: int64 [S], as many as there is
        room for. Pages that the device has not are queued to be sent; the host does not wait. Raises ValueError for a
        list that is shorter: its row would go on with another sequence's pages."""
        self._now += 1
        rows, late = np.zeros(len(slots), dtype=np.int64), []
        for i, (own, end) in enumerate(zip(slots, ends, strict=True)):
            held = self._held.get(own.data_ptr())
            if held is not None:
                rows[i] = held.row
                self._used[held.row] = self._now
            if held is None or held.num_tokens < end:
                if own.shape[0] < min(end, self.max_len):
                    raise ValueError(f"{end} positions are to be read of {own.shape[0]} slots")
                late.append(i)
        if late:
            self._send([(self._hold(slots[i], rows, i), slots[i]) for i in late])
        return rows

    def _hold(self, slots: torch.Tensor, rows: Int64, at: int) -> _Held:
        key = slots.data_ptr()
        held = self._held.get(key)
        if held is None:
            row = int(self._used.argmin())
            if (old := self._keys[row]) is not None:
                del self._held[old]
            held = self._held[key] = _Held(slots, row, 0)
            self._keys[row], self._used[row] = key, self._now
        rows[at] = held.row
        return held

    def _send(self, new: Sequence[tuple[_Held, torch.Tensor]]) -> None:
        """Pages past those that the rows hold. Raises ValueError where slots are not whole pages."""
        size, width = self.scratch.page_size, self.tables.shape[1]
        parts: list[tuple[Int64, Int64]] = []
        for held, slots in new:
            first = held.num_tokens // size
            of_pages = slots[first * size : self.max_len : size].numpy().astype(np.int64)
            pages, offset = np.divmod(of_pages, size)
            if offset.any():
                raise ValueError("a segment's slots do not begin at page borders")
            parts.append((held.row * width + first + np.arange(len(pages)), pages))
            held.slots, held.num_tokens = slots, min(slots.shape[0], self.max_len)
        sent = staged(np.concatenate([np.stack(part) for part in parts], axis=1), self.tables.device)
        self.tables.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


def filler_end(rows: int, scratch: Scratch) -> int:
    """``ends`` of a segment that stands for no sequence (``padding.filler``)."""
    return min(rows, scratch.page_size)


def words_of(shape: StaticShape) -> int:
    """Numbers that tell a device one batch: table, end and count of each segment, and every row's token."""
    return 3 * shape.requests + shape.num_rows


def in_place(segments: Sequence[Segment]) -> bool:
    """Whether all of them are rows that write where they stand: their places follow from their ends alone."""
    return all(segment.in_place for segment in segments)


def paged_ends(ends: Int64, page_size: int) -> tuple[Int32, Int32]:
    """Page lists of segments with so many positions: kv_indptr [S + 1] and last_page_len [S]."""
    pages = (ends + page_size - 1) // page_size
    return np.concatenate(([0], np.cumsum(pages))).astype(np.int32), ((ends - 1) % page_size + 1).astype(np.int32)
