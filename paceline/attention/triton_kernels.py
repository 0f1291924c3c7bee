"""Triton kernels of paged attention whose bits belong to the row alone (docs/internals/exactness.md).

A *packed row* is one query head of one batch row. A program takes a tile of 16 packed rows that read one KV head, and
goes over positions in blocks, both counted from position 0. Every run of SPLIT positions is a softmax sum of its own
(maximum, total, accumulator, all float32) which begins at nothing; sums of splits are merged in order of position. So
a packed row meets the same products of the same shapes in the same order, whoever shares its tile and whichever
program holds which splits:

- A product of matrices works row by row. A position of the block that a row does not see has weight 0 there, so all
  values of a prompt or a chain must be finite. Those of another branch of a tree need not be.
- A block that adds nothing to a row leaves its sum as it was, bit for bit. So does an empty sum in a merge.
- Rows share the columns before their tails. From the first block with a tail on, each batch row of the tile reads the
  block with its own slots. A position has the same place in the same block either way.
- A program that takes all splits merges them in registers with ``_merged``; ``_finish_kernel`` merges with it too.

Numbers of heads, pages and rows are arguments that no kernel is specialised on.
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from paceline.layers.ops_triton import INTERPRETED, _rounded

TILE = 16  # packed rows of a program: one MMA shape for every kind of batch
PREFIX, LENGTH, COLUMNS, TAIL = (tl.constexpr(i) for i in range(4))  # rows of a plan's table of rows
_TILE = tl.constexpr(TILE)
_ALL = tl.constexpr(2**30)  # more positions than any sequence has
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, total):
    """total + a b, float32. The interpreter multiplies bfloat16 as it lies in memory, which are no numbers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The softmax sum of no positions: maximum, total, accumulator."""
    return tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def _merged(top, total, acc, later_top, later_total, later_acc):
    """Softmax sums over two sets of positions as one: [M], [M] and [M, D] each. An empty one changes no bit."""
    higher = tl.maximum(top, later_top)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    scale, later_scale = tl.exp2(top - base), tl.exp2(later_top - base)
    first, second = total != 0.0, later_total != 0.0  # a sum that holds anything holds exp2(0); NaN is not 0
    both = first & second
    sum_total = total * scale + later_total * later_scale
    sum_acc = acc * scale[:, None] + later_acc * later_scale[:, None]
    top = tl.where(both, higher, tl.where(second, later_top, top))
    total = tl.where(both, sum_total, tl.where(second, later_total, total))
    acc = tl.where(both[:, None], sum_acc, tl.where(second[:, None], later_acc, acc))
    return top, total, acc


@triton.jit
def _with_block(top, total, acc, scores, value):
    """The sum with one block more. scores: [16, BLOCK] in units of log2, -inf where a row sees nothing."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    scale = tl.exp2(top - base)
    added = tl.sum(weights, axis=1)
    some = added != 0.0
    sum_acc = _dot(_rounded(weights, value.dtype), value, acc * scale[:, None])
    top = tl.where(some, higher, top)
    total = tl.where(some, total * scale + added, total)
    acc = tl.where(some[:, None], sum_acc, acc)
    return top, total, acc


@triton.jit
def _places(table, columns, tail, prefix, at, wanted, page_size, page_stride, slot_stride, EVEN: tl.constexpr):
    """Elements at which the pool holds positions ``at`` [BLOCK]: in pages before ``prefix``, then in a tail's slots."""
    paged = at < prefix
    entry = tl.load(table + tl.where(paged, columns + at // page_size, tail + at), mask=wanted, other=0)
    page = tl.where(paged, entry, entry // page_size).to(tl.int64)
    offset = tl.where(paged, at, entry) % page_size
    return (page * page_stride + offset * slot_stride) * EVEN


@triton.jit
def _load_rows(source, rows, wanted, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[n, BLOCK_WIDTH] from element ``rows`` [n] on, zeros past WIDTH and where nothing is wanted."""
    column = tl.arange(0, BLOCK_WIDTH)
    mask = wanted[:, None] & (column[None, :] < WIDTH)
    return tl.load(source + rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _split_sum(
    query, query_rope, pages, value_part, table, token, live, low, length, prefix, columns, tail, count, from_tail,
    begin, end, scale, page_size, page_stride, slot_stride,
    KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The softmax sum of the positions of blocks begin..end-1 that a row of the tile sees.

    from_tail: the first block in which a row of the tile reads its tail. From there on there is a step for each batch
    row of the tile. See _attend_kernel for the others.
    """
    top, total, acc = _nothing(_TILE, BLOCK_VALUE)
    begin = tl.maximum(begin, tl.min(tl.where(live, low, _ALL), axis=0) // BLOCK)
    end = tl.minimum(end, (tl.max(length, axis=0) + BLOCK - 1) // BLOCK)
    shared = tl.minimum(tl.maximum(from_tail, begin), end) - begin
    for step in range(shared + (end - begin - shared) * count):
        behind = step - shared
        alone = behind >= 0
        at = (begin + tl.where(alone, shared + behind // count, step)) * BLOCK + tl.arange(0, BLOCK)
        reads = live & ((behind < 0) | (token == behind % count))  # rows that this step is for
        last = tl.max(tl.where(reads, length, 0), axis=0)
        lowest = tl.min(tl.where(reads, low, _ALL), axis=0)
        in_pages = tl.where(alone, tl.max(tl.where(reads, prefix, 0), axis=0), _ALL)
        own_tail = tl.max(tl.where(reads, tail, -_ALL), axis=0)
        wanted = (at >= lowest) & (at < last)
        places = _places(table, columns, own_tail, in_pages, at, wanted, page_size, page_stride, slot_stride, EVEN)
        key = _load_rows(pages, places, wanted, KEY, BLOCK_KEY)
        scores = _dot(query, tl.trans(key), tl.zeros([_TILE, BLOCK], tl.float32))
        if ROPE > 0:
            scores = _dot(query_rope, tl.trans(_load_rows(pages + KEY, places, wanted, ROPE, BLOCK_ROPE)), scores)
        sees = reads[:, None] & (at[None, :] >= low[:, None]) & (at[None, :] < length[:, None])
        scores = tl.where(sees, scores * scale, -float("inf"))
        value = key if LATENT else _load_rows(pages + value_part, places, wanted, VALUE, BLOCK_VALUE)
        top, total, acc = _with_block(top, total, acc, scores, value)
    return top, total, acc


@triton.jit
def _row_reads(rows, num_rows, row, live):
    """LENGTH, PREFIX and TAIL of packed rows, [16] each; 0 of those that are not live."""
    length = tl.load(rows + LENGTH * num_rows + row, mask=live, other=0)
    prefix = tl.load(rows + PREFIX * num_rows + row, mask=live, other=0)
    return length, prefix, tl.load(rows + TAIL * num_rows + row, mask=live, other=0)


@triton.jit
def _store_part(accs, sums, at, size, live, top, total, acc, VALUE: tl.constexpr):
    """at: [16], the places of packed rows; size: of the maxima, behind which the totals lie."""
    tl.store(sums + at, top, mask=live)
    tl.store(sums + size + at, total, mask=live)
    column = tl.arange(0, acc.shape[1])
    tl.store(accs + at[:, None] * VALUE + column[None, :], acc, mask=live[:, None] & (column[None, :] < VALUE))


RUNTIME = [
    "num_rows", "first_tile", "base_row", "launched_rows", "heads", "query_row", "query_head", "page_size",
    "page_stride", "value_part", "slot_stride", "head_stride", "parts", "span", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def _attend_kernel(
    query, pages, table, rows, tiles, accs, sums, num_rows, first_tile, base_row, launched_rows, heads, query_row,
    query_head, page_size, page_stride, value_part, slot_stride, head_stride, parts, span, window, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Parts of one tile over one KV head. A part is the splits part * span .. part * span + span - 1.

    Grid: tiles, KV heads * tiles of a group's heads, programs that take the tile's parts in turn.

    rows: int32 [4, num_rows], what each row reads: PREFIX positions from pages (``table[COLUMNS + page]``), then slots
    up to LENGTH (``table[TAIL + position]``). tiles: int32 [n, 2], first row and number of rows. accs: float32 [parts,
    launched_rows, heads, VALUE]; sums: float32 [2, parts, launched_rows, heads], maxima and totals. Strides are in
    units of EVEN elements.
    """
    PACK: tl.constexpr = GROUP if GROUP < _TILE else _TILE  # heads of a group in a tile
    HEAD_TILES: tl.constexpr = (GROUP + _TILE - 1) // _TILE
    kv_head = tl.program_id(1) // HEAD_TILES
    tile = tiles + (first_tile + tl.program_id(0)) * 2
    first, count = tl.load(tile), tl.load(tile + 1)
    packed = tl.arange(0, _TILE)
    token = packed // PACK
    in_group = tl.program_id(1) % HEAD_TILES * _TILE + packed % PACK
    live = (token < count) & (in_group < GROUP)
    row = first + tl.where(live, token, 0)
    length, prefix, tail = _row_reads(rows, num_rows, row, live)
    columns = tl.load(rows + COLUMNS * num_rows + first)
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    from_tail = tl.min(tl.where(length > prefix, prefix, _ALL), axis=0) // BLOCK
    first_split = tl.min(tl.where(live, low, _ALL), axis=0) // SPLIT
    last_split = (tl.max(length, axis=0) + SPLIT - 1) // SPLIT
    head = kv_head * GROUP + in_group
    of_query = (row.to(tl.int64) * query_row + head * query_head) * EVEN
    key_query = _load_rows(query, of_query, live, KEY, BLOCK_KEY)
    rope_query = _load_rows(query + KEY, of_query, live, ROPE, BLOCK_ROPE) if ROPE > 0 else key_query
    of_head = pages + kv_head.to(tl.int64) * head_stride * EVEN
    mine = first_split // span + tl.program_id(2)
    for part in range(mine, (last_split + span - 1) // span, tl.num_programs(2)):
        top, total, acc = _nothing(_TILE, BLOCK_VALUE)
        for split in range(tl.maximum(first_split, part * span), tl.minimum(last_split, part * span + span)):
            first_block, end_block = split * (SPLIT // BLOCK), (split + 1) * (SPLIT // BLOCK)
            split_top, split_total, split_acc = _split_sum(
                key_query, rope_query, of_head, value_part * EVEN, table, token, live, low, length, prefix, columns,
                tail, count, from_tail, first_block, end_block, scale, page_size, page_stride, slot_stride,
                KEY, BLOCK_KEY, ROPE, BLOCK_ROPE, VALUE, BLOCK_VALUE, LATENT, BLOCK, EVEN,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, split_top, split_total, split_acc)
        at = (part * launched_rows + row - base_row).to(tl.int64) * heads + head
        _store_part(accs, sums, at, parts.to(tl.int64) * launched_rows * heads, live, top, total, acc, VALUE)


@triton.jit(do_not_specialize=["num_rows", "base_row", "launched_rows", "heads", "parts", "span", "window"])
def _finish_kernel(
    accs, sums, rows, sinks, out, num_rows, base_row, launched_rows, heads, parts, span, window,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, SPLIT: tl.constexpr, ITEMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merges the parts of ITEMS heads of rows in order of position, takes in sinks, divides.

    out: [T, heads, VALUE]; sinks: float32 [heads], or None. AHEAD parts are loaded before the first is needed.
    """
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    items = launched_rows.to(tl.int64) * heads
    live = item < items
    column = tl.arange(0, BLOCK_VALUE)
    mask = live[:, None] & (column[None, :] < VALUE)
    length = tl.load(rows + LENGTH * num_rows + base_row + item // heads, mask=live, other=0)
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first, last = low // SPLIT // span, ((length + SPLIT - 1) // SPLIT + span - 1) // span
    top, total, acc = _nothing(ITEMS, BLOCK_VALUE)
    for begin in range(tl.min(tl.where(last > 0, first, parts), axis=0), tl.max(last, axis=0), AHEAD):
        for i in tl.static_range(AHEAD):
            part = begin + i
            there = (part >= first) & (part < last)  # an empty sum stands for a part that is not
            at = part.to(tl.int64) * items + item
            part_top = tl.load(sums + at, mask=there, other=0.0)
            part_total = tl.load(sums + parts * items + at, mask=there, other=0.0)
            part_acc = tl.load(accs + at[:, None] * VALUE + column[None, :], mask=mask & there[:, None], other=0.0)
            top, total, acc = _merged(top, total, acc, part_top, part_total, part_acc)
    if sinks is not None:
        sink = tl.load(sinks + item % heads, mask=live, other=0.0).to(tl.float32) * _LOG2E
        higher = tl.maximum(top, sink)
        scale = tl.exp2(top - higher)
        total = total * scale + tl.exp2(sink - higher)
        acc = acc * scale[:, None]
    weight = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing is zeros
    result = tl.div_rn(acc, tl.broadcast_to(weight[:, None], [ITEMS, BLOCK_VALUE]))
    at = (base_row.to(tl.int64) * heads + item)[:, None] * VALUE + column[None, :]
    tl.store(out + at, _rounded(result, out.dtype.element_ty), mask=mask)
