"""Where top-k and top-p cut a row, by search: no sort, no host, and exact counts; masses in float64.

``params.TOLERANCE`` keeps the order of a sum from deciding, here as on the CPU.
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.sampling.packing import (
    CUT_ID,
    CUT_KEY,
    MASS_LIMIT,
    NUM_NUMBERS,
    NUM_WORDS,
    TEMPERATURE,
    TOP_K,
    DeviceRows,
)
from paceline.sampling.triton_parts import NO_COLUMN, key_value, row_top, sort_key
from paceline.triton_support import EXACT, next_power_of_2

BLOCK = 4096  # columns that the one program of a row reads at once


def cut(logits: torch.Tensor, rows: DeviceRows, tops: torch.Tensor) -> None:
    """Write CUT_KEY and CUT_ID of ``rows.cut_rows``. logits: float32 [R, V]; tops: float32 [R, C], of its chunks."""
    num_rows, chunks = rows.cut_rows.shape[0], tops.shape[1]
    if num_rows == 0:
        return
    _cut_kernel[(num_rows,)](
        logits, logits.stride(0), rows.cut_rows, rows.numbers, rows.words, tops, logits.shape[1], chunks,
        NUMBERS=NUM_NUMBERS, TEMPERATURE=TEMPERATURE, MASS_LIMIT=MASS_LIMIT, WORDS=NUM_WORDS, TOP_K=TOP_K,
        CUT_KEY=CUT_KEY, CUT_ID=CUT_ID, CHUNKS=next_power_of_2(chunks),
        BLOCK=min(BLOCK, next_power_of_2(logits.shape[1])), num_warps=16, **EXACT,
    )  # fmt: skip


@triton.jit
def _cut_kernel(
    logits, stride, rows, numbers, words, tops, vocab_size, chunks,
    NUMBERS: tl.constexpr, TEMPERATURE: tl.constexpr, MASS_LIMIT: tl.constexpr,
    WORDS: tl.constexpr, TOP_K: tl.constexpr, CUT_KEY: tl.constexpr, CUT_ID: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where one row is cut. What stays is ranked by (logit, lowest id): all keys above CUT_KEY, and those that equal it
    up to CUT_ID. Top-k comes first; top-p's mass is taken of what it leaves."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    logits += row * stride
    temperature = tl.load(numbers + row * NUMBERS + TEMPERATURE)
    limit = tl.load(numbers + row * NUMBERS + MASS_LIMIT)
    top_k = tl.load(words + row * WORDS + TOP_K)
    best = row_top(tops + row * chunks, chunks, CHUNKS)
    top = best.to(tl.float64)
    highest = sort_key(best)
    cut_key = tl.full((), -2147483648, tl.int32)
    need = tl.full((), 2147483647, tl.int32)  # how many entries of cut_key itself stay
    if top_k > 0:
        cut_key, above = _search(
            logits, cut_key, highest, top_k.to(tl.float64), top, temperature, vocab_size, False, BLOCK
        )
        need = top_k - above.to(tl.int32)
    if limit < float("inf"):
        goal = limit * _mass(logits, cut_key, need, top, temperature, vocab_size, BLOCK)
        cut_key, above = _search(logits, cut_key, highest, goal, top, temperature, vocab_size, True, BLOCK)
        weight = tl.exp((key_value(cut_key).to(tl.float64) - top) / temperature)
        # No more than top-k left, since the limit is below 1.
        enough = tl.maximum(tl.ceil((goal - above) / weight), 1.0)
        need = tl.where((weight > 0.0) & (enough < 2147483520.0), enough, 2147483520.0).to(tl.int32)
    tl.store(words + row * WORDS + CUT_KEY, cut_key)
    tl.store(words + row * WORDS + CUT_ID, _last_id(logits, cut_key, need, vocab_size, BLOCK))


@triton.jit
def _search(logits, low, high, goal, top, temperature, vocab_size, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in low..high from which on there is ``goal`` of entries (or of mass), and what there is above it.

    By halves of the keys' range, narrowed each time to keys that occur: about log2 V passes. From ``low`` on there is
    enough by assumption, and nothing lies above ``high``.
    """
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        amount, next_up, next_down = _probe(logits, low, middle, high, top, temperature, vocab_size, MASS, BLOCK)
        if above + amount >= goal:
            low = next_up
        else:
            above += amount
            high = next_down
    return low, above


@triton.jit
def _probe(logits, low, middle, high, top, temperature, vocab_size, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Entries (or mass) in middle..high, float64; the lowest key there (``high`` if none); the highest in
    low..middle - 1 (``low`` if none)."""
    total = tl.zeros([BLOCK], tl.float64)
    lowest = tl.full([BLOCK], 2147483647, tl.int32)
    highest = tl.full([BLOCK], -2147483648, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        values = tl.load(logits + columns, mask=mask, other=-float("inf"))
        keys = sort_key(values)
        upper = mask & (keys >= middle) & (keys <= high)
        lowest = tl.minimum(lowest, tl.where(upper, keys, 2147483647))
        highest = tl.maximum(highest, tl.where(mask & (keys >= low) & (keys < middle), keys, -2147483648))
        if MASS:
            if tl.max(upper.to(tl.int32), axis=0) > 0:  # most blocks hold none once the search is narrow
                total += tl.where(upper, tl.exp((values.to(tl.float64) - top) / temperature), 0.0)
        else:
            total += upper.to(tl.float64)
    next_up = tl.minimum(tl.min(lowest, axis=0), high)
    next_down = tl.maximum(tl.max(highest, axis=0), low)
    return tl.sum(total, axis=0), next_up, next_down


@triton.jit
def _mass(logits, key, need, top, temperature, vocab_size, BLOCK: tl.constexpr):
    """Mass above ``key``, and of ``need`` entries of it or of all that there are: sum exp((logit - top) / T)."""
    total = tl.zeros([BLOCK], tl.float64)
    equal = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        values = tl.load(logits + columns, mask=mask, other=-float("inf"))
        keys = sort_key(values)
        total += tl.where(mask & (keys > key), tl.exp((values.to(tl.float64) - top) / temperature), 0.0)
        equal += (mask & (keys == key)).to(tl.int32)
    stay = tl.minimum(tl.sum(equal, axis=0), need)
    weight = tl.exp((key_value(key).to(tl.float64) - top) / temperature)
    return tl.sum(total, axis=0) + tl.where(stay > 0, weight * stay.to(tl.float64), 0.0)


@triton.jit
def _last_id(logits, key, need, vocab_size, BLOCK: tl.constexpr):
    """Column of the ``need``-th entry of ``key``; the highest int32 where there are fewer."""
    last = tl.full((), 2147483647, tl.int32)
    before = tl.full((), 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        keys = sort_key(tl.load(logits + columns, mask=mask, other=-float("inf")))
        equal = (mask & (keys == key)).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0)
        hit = (equal > 0) & (rank == need)
        last = tl.minimum(last, tl.min(tl.where(hit, columns, NO_COLUMN), axis=0))
        before += tl.sum(equal, axis=0)
    return last
