"""Which shapes get a CUDA graph, and which of them a batch runs in. Pure functions.

A graph is of one shape, (sequences, rows of each); a batch runs in the smallest that holds it, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PADDING = 4.0  # padded rows over real ones; a batch that would run with more is cheaper without a graph
FREE_ROWS = 32  # this few rows cost as much as one: weights are read once either way


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape."""

    requests: int
    rows: int  # of each request

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch."""
        return self.requests * self.rows


def batch_sizes(most: int) -> tuple[int, ...]:
    """Numbers of sequences, ascending: 1, 2, 4, 8, 16, then half-way between powers of two as well; and ``most``."""
    powers = [1 << i for i in range(most.bit_length())]
    sizes = [*powers, *(power + power // 2 for power in powers if power >= 16)]
    return tuple(sorted({size for size in sizes if size < most} | {most}))


def row_counts(most: int, varies: bool) -> tuple[int, ...]:
    """Rows of a request, ascending. most: of the largest tree. varies: draft lengths change from round to round."""
    between = [1 << i for i in range(1, most.bit_length()) if 1 << i < most] if varies else []
    return tuple(sorted({1, *between, most}))


def all_buckets(max_batch: int, max_rows: int, varies: bool) -> list[Bucket]:
    """Largest first: later captures then find the scratch memory of earlier ones large enough."""
    pairs = [Bucket(b, r) for b in batch_sizes(max_batch) for r in row_counts(max_rows, varies)]
    return sorted(pairs, key=lambda bucket: (bucket.num_rows, bucket.rows), reverse=True)


def choose(buckets: Sequence[Bucket], counts: Sequence[int]) -> Bucket | None:
    """The bucket with the fewest rows that holds requests of ``counts`` rows; None: none does, or not well."""
    rows = max(counts)
    holds = [bucket for bucket in buckets if bucket.requests >= len(counts) and bucket.rows >= rows]
    best = min(holds, key=lambda bucket: (bucket.num_rows, bucket.rows), default=None)
    if best is not None and best.num_rows > max(FREE_ROWS, MAX_PADDING * sum(counts)):
        return None
    return best


@dataclass
class MemoryBound:
    """Bytes that captures may take. What the last one took is what the next is expected to take at most, since they
    come largest first; the first is expected to take nothing."""

    limit: int
    spent: int = 0
    last: int = 0

    def allows_next(self) -> bool:
        """Whether another capture is expected to stay within the bound."""
        return self.spent + self.last <= self.limit

    def took(self, num_bytes: int) -> None:
        """A capture took so many; never less than none, whatever else was freed meanwhile."""
        self.last = max(num_bytes, 0)
        self.spent += self.last
