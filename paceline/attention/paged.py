"""A batch in the terms of kernels over paged KV: which pages each request reads, how far, and what its rows see.

Pure functions of a batch; numpy, on the host. A request is one segment. Its KV is the *columns* 0..kv_len-1, column c
being position c of its page table. For rows of a tree, columns past the prefix are slots in the order in which nodes
were written, and the mask says which of them are ancestors (algorithms.md D1).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.attention.base import Segment
from paceline.layers.upload import Int32, Int64

UInt8 = npt.NDArray[np.uint8]


class PagedKind(enum.StrEnum):
    """Which kernel a batch needs."""

    DECODE = "decode"  # one row a request, which sees all of its columns
    CAUSAL = "causal"  # rows are the last columns, each sees those up to its own
    MASKED = "masked"  # a mask of rows and columns


@dataclass(frozen=True)
class PagedBatch:
    """S requests, T rows. Arrays are int32."""

    kind: PagedKind
    qo_indptr: Int32  # [S + 1], rows of request s are qo_indptr[s]..qo_indptr[s + 1]-1
    kv_indptr: Int32  # [S + 1], its pages are indices[kv_indptr[s]:kv_indptr[s + 1]]
    indices: Int32 | None  # [total pages], page numbers in order of position; None: the device knows them
    last_page_len: Int32  # [S], columns in its last page, 1..page_size
    kv_lens: Int32  # [S], at least 1
    masks: Masks | None  # MASKED alone

    @property
    def num_requests(self) -> int:
        """S."""
        return len(self.kv_lens)

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.qo_indptr[-1])


@dataclass(frozen=True)
class Masks:
    """What rows see: column c of request s is seen by row r if c < prefix_lens[r] or tails[r, c - bases[s]].

    ``byte_indptr`` is where each request's bits begin once they are packed (``pack_reference``).
    """

    prefix_lens: Int32  # [T]
    bases: Int32  # [S], no tail reaches below
    tails: Int32  # [T, W] of 0 and 1
    byte_indptr: Int32  # [S + 1]


def paged_batch(segments: Sequence[Segment], page_size: int, masked: bool = False) -> PagedBatch:
    """Describe a batch. masked: give linear segments their masks too (a graph's kernel is fixed).

    Raises ValueError where a segment's slots are not whole pages in order of position.
    """
    counts = np.array([len(segment.token_ids) for segment in segments], dtype=np.int64)
    prefixes = [np.fromiter(segment.prefix_lens, np.int64, n) for segment, n in zip(segments, counts, strict=True)]
    tails = [_tail_columns(segment, prefix, page_size) for segment, prefix in zip(segments, prefixes, strict=True)]
    kv_lens = np.array([max(p.max(), t.shape[1] + p.min(), 1) for p, t in zip(prefixes, tails, strict=True)])
    pages = [_pages(segment, int(n), page_size) for segment, n in zip(segments, kv_lens, strict=True)]
    causal = not masked and all(
        t.shape[1] == 0 and np.array_equal(p, np.arange(n - len(p) + 1, n + 1).clip(0))
        for p, t, n in zip(prefixes, tails, kv_lens, strict=True)
    )
    kind = PagedKind.MASKED if not causal else PagedKind.CAUSAL
    if causal and counts.max() == 1:
        kind = PagedKind.DECODE
    return PagedBatch(
        kind=kind,
        qo_indptr=_indptr(counts),
        kv_indptr=_indptr(np.array([len(part) for part in pages])),
        indices=np.concatenate(pages).astype(np.int32),
        last_page_len=((kv_lens - 1) % page_size + 1).astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        masks=None if causal else _masks(prefixes, tails, counts, kv_lens),
    )


def _indptr(counts: npt.NDArray[np.int64]) -> Int32:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _pages(segment: Segment, kv_len: int, page_size: int) -> Int64:
    """Pages of columns 0..kv_len-1."""
    first = segment.slots[:kv_len:page_size].numpy().astype(np.int64)
    pages, offset = np.divmod(first, page_size)
    if offset.any():
        raise ValueError("a segment's slots do not begin at page borders")
    return pages


def _tail_columns(segment: Segment, prefix_lens: Int64, page_size: int) -> npt.NDArray[np.bool_]:
    """Which columns past the shortest prefix each row sees through its tail: bool [rows, W], W = 0 without tails."""
    rows = len(prefix_lens)
    lengths = [len(tail) for tail in segment.tails]
    if not sum(lengths):
        return np.zeros((rows, 0), dtype=np.bool_)
    base = int(prefix_lens.min())
    slots = np.array([slot for tail in segment.tails for slot in tail], dtype=np.int64)
    first = base // page_size  # tails lie in or after the page in which the prefix ends
    pages = segment.slots[first * page_size :: page_size].numpy().astype(np.int64) // page_size
    unique, inverse = np.unique(slots // page_size, return_inverse=True)
    found = unique[:, None] == pages[None]
    if not found.any(axis=1).all():
        raise ValueError("a row's tail is outside of its segment's pages")
    columns = (first + found.argmax(axis=1)[inverse]) * page_size + slots % page_size - base
    if columns.min() < 0:
        raise ValueError("a row's tail is inside of its prefix")
    tails = np.zeros((rows, int(columns.max()) + 1), dtype=np.bool_)
    tails[np.repeat(np.arange(rows), lengths), columns] = True
    return tails


def _masks(prefixes: Sequence[Int64], tails: Sequence[npt.NDArray[np.bool_]], counts: Int64, kv_lens: Int64) -> Masks:
    width = max(max(tail.shape[1] for tail in tails), 1)
    wide = np.zeros((int(counts.sum()), width), dtype=np.int32)
    at = 0
    for tail in tails:
        wide[at : at + tail.shape[0], : tail.shape[1]] = tail
        at += tail.shape[0]
    return Masks(
        prefix_lens=np.concatenate(prefixes).astype(np.int32),
        bases=np.array([p.min() for p in prefixes], dtype=np.int32),
        tails=wide,
        byte_indptr=_indptr(-(-counts * kv_lens // 8)),
    )


def pack_reference(batch: PagedBatch) -> UInt8:
    """The packed masks, uint8 [byte_indptr[-1]]: bit ``row * kv_len + column`` of a request, lowest bit first, each
    request from a byte of its own."""
    masks = batch.masks
    assert masks is not None
    parts = []
    for s, kv_len in enumerate(batch.kv_lens):
        rows = slice(batch.qo_indptr[s], batch.qo_indptr[s + 1])
        columns = np.arange(kv_len)
        seen = columns[None] < masks.prefix_lens[rows, None]
        tail = np.zeros_like(seen)
        width = min(masks.tails.shape[1], kv_len - masks.bases[s])
        tail[:, masks.bases[s] : masks.bases[s] + width] = masks.tails[rows, :width] > 0
        parts.append(np.packbits(seen | tail, bitorder="little"))
    return np.concatenate(parts)
