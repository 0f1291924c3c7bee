"""From the pool of one rank into that of another: page sizes, head ranges and dtypes that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.reshard import Side, plans_into, reshard
from kv_transfer.layout.rows import RowSource, RowTarget
from kv_transfer.transports.base import byte_view
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from tests.kv_transfer.layout.sharded import cut, fill, make_pool, random_rows, read, scattered_slots
from tests.support.pool_rows import write_rows

torch.set_num_threads(1)

LAYOUT = KvLayout(
    (
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 4, 8),
        KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 8, 4),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 1, 8),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 2, 8),
    ),
    torch.bfloat16,
)
FLOAT = KvLayout(LAYOUT.layers, torch.float32)
EVERYTHING = range(5)
PAGE_SIZES = st.sampled_from([1, 3, 7, 16, 64]) | st.integers(1, 70)
DEGREES = st.sampled_from([1, 2, 4, 8])


def move(source: RowSource, target: RowTarget, slots: tuple[torch.Tensor, torch.Tensor], cuts: Sequence[int]) -> None:
    """Every layer's rows in pieces of tokens, in two groups of layers."""
    borders = sorted({0, len(slots[0]), *(c for c in cuts if c < len(slots[0]))})
    for layers in (range(0, 2), range(2, 5)):
        for start, end in pairwise(borders):
            data = source.gather(layers, slots[0][start:end])
            assert data.nbytes == (end - start) * source.token_bytes(layers)
            target.scatter(layers, slots[1][start:end], data)


def untouched(pool: KvPool, slots: torch.Tensor) -> bool:
    """No slot but ``slots`` was written since `make_pool`."""
    others = torch.ones(pool.num_pages * pool.page_size, dtype=torch.bool)
    others[slots.long()] = False
    return all(bool((rows == 77.0).all()) for rows in read(pool, others.nonzero().view(-1)))


@settings(max_examples=80, deadline=None)
@given(PAGE_SIZES, PAGE_SIZES, st.integers(0, 90), st.lists(st.integers(1, 89), max_size=4), st.integers(0, 999))
def test_page_sizes_convert_in_any_pieces(mine: int, theirs: int, num_tokens: int, cuts: list[int], seed: int) -> None:
    side = Side(LAYOUT)
    pools = make_pool(side, num_tokens, mine), make_pool(side, num_tokens, theirs)
    slots = (
        scattered_slots(num_tokens, mine, pools[0].num_pages, seed),
        scattered_slots(num_tokens, theirs, pools[1].num_pages, seed + 1),
    )
    rows = random_rows(LAYOUT, num_tokens, seed)
    fill(pools[0], slots[0], rows)
    plan = reshard(side, side)
    move(RowSource(pools[0], plan), RowTarget(pools[1], plan), slots, cuts)
    for got, wanted in zip(read(pools[1], slots[1]), rows, strict=True):
        assert torch.equal(got, wanted)
    assert untouched(pools[1], slots[1])


@settings(max_examples=60, deadline=None)
@given(DEGREES, DEGREES, PAGE_SIZES, PAGE_SIZES, st.booleans(), st.integers(1, 40), st.integers(0, 999))
def test_degrees_page_sizes_and_dtypes_differ_at_once(
    sources: int, dests: int, mine: int, theirs: int, cast: bool, num_tokens: int, seed: int
) -> None:
    layout = FLOAT if cast else LAYOUT
    rows = random_rows(layout, num_tokens, seed)
    held = []
    for rank in range(sources):
        side = Side(layout, sources, rank)
        pool = make_pool(side, num_tokens, mine)
        slots = scattered_slots(num_tokens, mine, pool.num_pages, seed + rank)
        fill(pool, slots, [cut(full, sources, rank) for full in rows])
        held.append((pool, slots))
    for rank in range(dests):
        side = Side(LAYOUT, dests, rank)
        pool = make_pool(side, num_tokens, theirs)
        slots = scattered_slots(num_tokens, theirs, pool.num_pages, seed - rank)
        for plan in plans_into(layout, sources, side):
            source, source_slots = held[plan.source.rank]
            move(RowSource(source, plan), RowTarget(pool, plan), (source_slots, slots), [3, 20])
        for got, full in zip(read(pool, slots), rows, strict=True):
            assert torch.equal(got, cut(full, dests, rank).to(torch.bfloat16))
        assert untouched(pool, slots)


def test_unsharded_bytes_are_the_pools_own() -> None:
    pool = make_pool(Side(LAYOUT), 20, 16)
    slots = scattered_slots(20, 16, pool.num_pages, 4)
    fill(pool, slots, random_rows(LAYOUT, 20, 4))
    source = RowSource(pool, reshard(Side(LAYOUT), Side(LAYOUT)))
    assert torch.equal(byte_view(source.gather(EVERYTHING, slots)), byte_view(pool.gather(EVERYTHING, slots)))
    assert source.token_bytes(EVERYTHING) == LAYOUT.token_bytes(LayerOwner.TARGET)


def test_wire_order_of_a_slice_is_layer_token_k_heads_v_heads() -> None:
    pool = make_pool(Side(LAYOUT), 6, 4)
    slots = scattered_slots(6, 4, pool.num_pages, 8)
    rows = random_rows(LAYOUT, 6, 8)
    fill(pool, slots, rows)
    plan = reshard(Side(LAYOUT), Side(LAYOUT, 2, 1))
    wire = RowSource(pool, plan).gather(EVERYTHING, slots)
    second_half = (rows[0][:, :, 2:], rows[1], rows[2][:, :, 4:], rows[3], rows[4][:, :, 1:])
    assert torch.equal(wire, torch.cat([tensor.reshape(-1) for tensor in second_half]))


def test_cast_rows_round_as_torch_does() -> None:
    """Ties, overflow, infinities, NaN and denormals."""
    special = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, float("inf"), float("-inf"), 1e-40, -0.0])
    layout = KvLayout((KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 8),), torch.float32)
    kept = KvLayout(layout.layers, torch.bfloat16)
    source, target = make_pool(Side(layout), 2, 2), make_pool(Side(kept), 2, 1)
    slots = torch.tensor([1, 0])
    rows = torch.stack((special, torch.full((8,), float("nan"))))
    write_rows(source, 0, slots, rows)
    plan = reshard(Side(layout), Side(kept))
    wire = RowSource(source, plan)
    assert wire.dtype is torch.bfloat16
    assert wire.token_bytes(range(1)) == 16
    RowTarget(target, plan).scatter(range(1), slots, wire.gather(range(1), slots))
    assert torch.equal(byte_view(target.read_latent(0, slots)), byte_view(rows.to(torch.bfloat16)))


def test_a_layer_that_does_not_cross_takes_no_bytes() -> None:
    plan = reshard(Side(LAYOUT, 2, 1), Side(LAYOUT, 1))  # rank 0 sends the latent and the one head of layer 3
    pool = make_pool(Side(LAYOUT, 2, 1), 4, 4)
    source = RowSource(pool, plan)
    assert [source.token_bytes(range(i, i + 1)) for i in EVERYTHING] == [64, 0, 64, 0, 32]
    assert source.gather(range(1, 2), torch.arange(4)).numel() == 0
    assert source.gather(EVERYTHING, torch.arange(0)).numel() == 0


def test_a_pool_of_another_shard_is_refused_by_name() -> None:
    whole, half = make_pool(Side(LAYOUT), 4, 4), make_pool(Side(LAYOUT, 2, 0), 4, 4)
    plan = reshard(Side(LAYOUT, 2, 1), Side(LAYOUT))
    RowSource(half, plan)
    RowTarget(whole, plan)
    for make in (lambda: RowSource(whole, plan), lambda: RowTarget(half, plan)):
        with pytest.raises(ConfigError, match=r"layout: the pool holds .* rank \d of \d needs"):
            make()


@pytest.mark.parametrize("degree", [1, 2])
def test_misuse_is_refused(degree: int) -> None:
    side = Side(LAYOUT, degree)
    plan = reshard(side, Side(LAYOUT))
    pool, whole = make_pool(side, 4, 4), make_pool(Side(LAYOUT), 4, 4)
    source, target = RowSource(pool, plan), RowTarget(whole, plan)
    slots = torch.arange(4)
    data = source.gather(EVERYTHING, slots)
    with pytest.raises(ValueError, match="expected"):
        target.scatter(EVERYTHING, slots, data[1:])
    with pytest.raises(ValueError, match=r"float32"):
        target.scatter(EVERYTHING, slots, data.float())
    with pytest.raises(ValueError, match="outside a pool of 5 layers"):
        source.gather(range(4, 6), slots)
    with pytest.raises(ValueError, match="outside a pool of 5 layers"):
        target.scatter(range(-1, 1), slots, data)
    for slot in (-1, pool.num_pages * 4):
        with pytest.raises(IndexError):
            source.gather(EVERYTHING, torch.tensor([slot]))
        with pytest.raises(IndexError):
            target.scatter(EVERYTHING, torch.tensor([slot]), source.gather(EVERYTHING, slots[:1]))
