"""What the Triton kernels read of a batch: for each row its page table and tail, and which rows share a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from paceline.attention.base import AttentionPlan, Segment, StaticShape
from paceline.attention.placed import PlacedBatch, PlacedPlan
from paceline.attention.placed_triton import place_reads
from paceline.attention.triton_kernels import TILE
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import Int32, Int64, pinned, staged, staged_together


@dataclass(frozen=True)
class Reads:
    """Where T rows read, on the host or on a device.

    rows: int32 [4, T]. A row sees ``PREFIX`` positions at ``table[COLUMNS + position // page_size]``, a page, and those
    from there up to ``LENGTH`` at ``table[TAIL + position]``, a slot.
    """

    rows: Int32
    table: Int32  # [n], pages of all segments, then slots of all tails

    @property
    def longest(self) -> int:
        """Positions that a row sees at most."""
        return int(self.rows[1].max(initial=0))


def reads_of(segments: Sequence[Segment], page_size: int) -> Reads:
    """The reads of a batch. Raises ValueError where a segment's slots do not begin at page borders."""
    counts = _counts(segments)
    segment_of = np.repeat(np.arange(len(segments)), counts)
    prefixes = np.fromiter(chain.from_iterable(s.prefix_lens for s in segments), np.int64, len(segment_of))
    used = np.maximum.reduceat(prefixes, _starts(counts))
    firsts = [s.slots.numpy()[:end:page_size] for s, end in zip(segments, used.tolist(), strict=True)]
    pages, offsets = np.divmod(np.concatenate(firsts), page_size)
    if offsets.any():
        raise ValueError("a segment's slots do not begin at page borders")
    columns = _starts(-(-used // page_size))[segment_of]
    lengths, slots = _tails(segments, len(segment_of))
    ends = len(pages) + _starts(lengths)
    rows = np.stack((prefixes, prefixes + lengths, columns, ends - prefixes))
    return Reads(rows.astype(np.int32), np.concatenate((pages, slots)).astype(np.int32))


def tiles_of(counts: Int64, tokens: int) -> Int32:
    """First row and number of rows of each tile, [n, 2], in order: at most ``tokens`` rows of one segment."""
    tiles = -(-counts // tokens)
    segment_of = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(segment_of)) - _starts(tiles)[segment_of]) * tokens
    first = _starts(counts)[segment_of] + offset
    return np.stack((first, np.minimum(tokens, counts[segment_of] - offset)), axis=1).astype(np.int32)


def _counts(segments: Sequence[Segment]) -> Int64:
    return np.fromiter((len(s.token_ids) for s in segments), np.int64, len(segments))


def _starts(counts: Int64) -> Int64:
    return np.cumsum(counts) - counts


def _tails(segments: Sequence[Segment], num_rows: int) -> tuple[Int64, Int64]:
    """Lengths [T] of the rows' tails, and the slots of all of them."""
    if not any(s.tails for s in segments):
        return np.zeros(num_rows, dtype=np.int64), np.zeros(0, dtype=np.int64)
    tails = list(chain.from_iterable(s.tails or [()] * len(s.token_ids) for s in segments))
    lengths = np.fromiter(map(len, tails), np.int64, num_rows)
    return lengths, np.fromiter(chain.from_iterable(tails), np.int64, int(lengths.sum()))


class TritonPlan(AttentionPlan):
    """A batch on ``device``. Its arrays are made when the first layer asks, since only a layer knows its pages."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.device = device
        self._segments, self._counts = segments, _counts(segments)
        self._reads: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by page size
        self._tiles: dict[int, tuple[Int32, torch.Tensor]] = {}  # by rows of a tile

    def reads(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rows, table (see ``Reads``), and the positions that a row sees at most."""
        if page_size not in self._reads:
            found = reads_of(self._segments, page_size)
            rows, table = staged_together([found.rows.ravel(), found.table], self.device)
            self._reads[page_size] = rows.view(found.rows.shape), table, found.longest
        return self._reads[page_size]

    def tiles(self, tokens: int) -> tuple[Int32, torch.Tensor]:
        """``tiles_of`` the batch, on the host and on the device."""
        if tokens not in self._tiles:
            host = tiles_of(self._counts, tokens)
            self._tiles[tokens] = host, staged(host, self.device)
        return self._tiles[tokens]


class StaticTritonPlan(TritonPlan, PlacedPlan):
    """The same in memory that stays, for every batch of one shape: the tiles and the grid are the shape's.

    A batch that is told by ``fill`` brings its pages along. One that is worked out by ``derive`` reads them where the
    device keeps them, so a plan is used in one of the two ways alone.
    """

    def __init__(self, shape: StaticShape, kv: KvPool) -> None:
        super().__init__((), kv.device)
        self._shape, self._page_size = shape, kv.page_size
        self._counts = np.full(shape.requests, shape.rows, dtype=np.int64)
        for tokens in {TILE // group for group in range(1, TILE + 1)}:  # no upload inside of a capture
            self.tiles(tokens)
        slots = shape.num_rows * shape.rows if shape.tree else 0  # a path has no more nodes than its tree
        pages = shape.requests * -(-shape.max_len // kv.page_size)
        self._memory = torch.zeros(4 * shape.num_rows + pages + slots, dtype=torch.int32, device=kv.device)
        self._rows, self._table = self._memory[: 4 * shape.num_rows].view(4, -1), self._memory[4 * shape.num_rows :]
        self._longest = shape.max_len + (shape.rows if shape.tree else 0)

    def fill(self, segments: Sequence[Segment]) -> None:
        """See StaticPlan; one copy. Raises ValueError for a batch that the shape has no room for."""
        found = reads_of(segments, self._page_size)
        packed = np.concatenate((found.rows.ravel(), found.table))
        if found.longest > self._longest:
            raise ValueError(f"a row sees {found.longest} positions, and the graph is for {self._longest}")
        if found.rows.shape[1] != self._shape.num_rows or packed.size > len(self._memory):
            raise ValueError(f"a batch of {found.rows.shape[1]} rows and {packed.size} indices is not of {self._shape}")
        self._memory[: packed.size].copy_(pinned(packed, self.device), non_blocking=True)

    def reads(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """See TritonPlan."""
        assert page_size == self._page_size
        return self._rows, self._table, self._longest

    def derive(self, batch: PlacedBatch) -> None:
        """See PlacedPlan."""
        self._table = batch.tables.view(-1)
        place_reads(batch.which, batch.ends, self._rows, batch.tables.shape[1])
