"""Batches padded to the fixed shape of a CUDA graph (algorithms.md D9).

Every segment gets the same number of rows. Rows that stand for nothing come *first*: a segment's own rows stay its
last, so that causal attention aligned to the end is right for them, its last row is at a fixed place, and no row of a
live sequence ever sees a slot that padding wrote. What padding rows write goes to a scratch page that no sequence owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.attention.base import Segment, StaticShape
from paceline.layers.upload import Int64


@dataclass(frozen=True)
class Scratch:
    """The page that padding writes to."""

    page: int
    page_size: int

    @property
    def slot(self) -> int:
        """Its first slot."""
        return self.page * self.page_size

    def slots(self) -> torch.Tensor:
        """Position -> slot within it, int32 [page_size]."""
        return torch.arange(self.slot, self.slot + self.page_size, dtype=torch.int32)


def last_rows(end: int, rows: int) -> list[int]:
    """``prefix_lens`` of the last ``rows`` positions before ``end``; 0 where there is none."""
    return [max(end - rows + row + 1, 0) for row in range(rows)]


def filler(rows: int, scratch: Scratch) -> Segment:
    """A segment that stands for no sequence: it reads and writes the scratch page alone."""
    seen = last_rows(min(rows, scratch.page_size), rows)
    return Segment([0] * rows, [0] * rows, [scratch.slot] * rows, scratch.slots(), seen)


def pad_segment(segment: Segment, rows: int, scratch: Scratch) -> Segment:
    """``segment`` with padding rows in front. They stand at position 0, which every rotary table has."""
    missing = rows - len(segment.token_ids)
    if missing == 0:
        return segment
    blank = [0] * missing
    tails = [*([()] * missing), *segment.tails] if segment.tails else ()
    if segment.tails:
        seen = [*([min(segment.prefix_lens)] * missing), *segment.prefix_lens]
    else:
        seen = [*last_rows(segment.prefix_lens[0] - 1, missing), *segment.prefix_lens]
    return Segment(
        [*blank, *segment.token_ids],
        [*blank, *segment.positions],
        [*([scratch.slot] * missing), *segment.write_slots],
        segment.slots,
        seen,
        tails,
    )


def pad_segments(segments: Sequence[Segment], shape: StaticShape, scratch: Scratch) -> list[Segment]:
    """``segments``, no more and no longer than ``shape`` has room for, as a batch of exactly that shape."""
    padded = [pad_segment(segment, shape.rows, scratch) for segment in segments]
    return padded + [filler(shape.rows, scratch)] * (shape.requests - len(padded))


def real_rows(segments: Sequence[Segment], rows: int) -> Int64:
    """Where the rows of ``segments`` lie in their padded batch, int64 [T]."""
    counts = np.array([len(segment.token_ids) for segment in segments], dtype=np.int64)
    return padded_rows(counts, rows)


def padded_rows(counts: Int64, rows: int) -> Int64:
    """Where the rows of segments with ``counts`` rows lie in a batch of ``rows`` rows each, the last of them: int64
    [sum of counts]."""
    behind = np.arange(1, len(counts) + 1) * rows - np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(behind, counts)
