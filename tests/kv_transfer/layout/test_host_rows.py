"""One call for all layers against the torch loops: equal bytes, the same places, nothing else touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.reshard import Side, plans_into
from kv_transfer.layout.rows import RowSource, RowTarget
from kv_transfer.transports.base import byte_view
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from tests.kv_transfer.layout.sharded import make_pool, scattered_slots
from tests.support.needs import needs_kernels

pytestmark = needs_kernels

torch.set_num_threads(1)
LAYOUT = KvLayout(
    (
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 4, 5),
        KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 8, 4),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 4, 8),
    ),
    torch.bfloat16,
)
LAYERS = st.sampled_from([range(0, 4), range(0, 1), range(1, 3), range(3, 4)])


TOKENS = 64  # that a pool has room for, at least


def slots_of(pool: KvPool, num_tokens: int, runs: bool, seed: int) -> torch.Tensor:
    """Distinct; with ``runs`` neighbours that begin anywhere in a page, and one that stands apart."""
    if not runs:
        return scattered_slots(num_tokens, pool.page_size, pool.num_pages, seed)
    start = seed % (pool.num_pages * pool.page_size - num_tokens)
    return torch.arange(start, start + num_tokens, dtype=torch.int32).roll(1)


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    num_tokens=st.integers(0, 40),
    layers=LAYERS,
    runs=st.booleans(),
    degree=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_both_ways_equal_torch(
    page_size: int, num_tokens: int, layers: range, runs: bool, degree: int, seed: int
) -> None:
    side = Side(LAYOUT, degree, seed % degree)
    (plan,) = plans_into(LAYOUT, 1, side)
    pool = make_pool(Side(LAYOUT), TOKENS, page_size)
    for data in pool.data:
        data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(seed)))
    slots = slots_of(pool, num_tokens, runs, seed)
    fast, slow = RowSource(pool, plan), RowSource(pool, plan)
    assert fast._host is not None
    slow._host = None
    rows = fast.gather(layers, slots)
    assert torch.equal(byte_view(rows), byte_view(slow.gather(layers, slots)))

    pools = make_pool(side, TOKENS, page_size), make_pool(side, TOKENS, page_size)
    targets = RowTarget(pools[0], plan), RowTarget(pools[1], plan)
    targets[1]._host = None
    for target in targets:
        target.scatter(layers, slots, rows)
    for mine, theirs in zip(pools[0].data, pools[1].data, strict=True):
        assert torch.equal(byte_view(mine), byte_view(theirs))


@pytest.mark.parametrize("slot", [-1, 112, 2**40])
def test_a_slot_outside_the_pool_is_refused(slot: int) -> None:
    side = Side(LAYOUT)
    (plan,) = plans_into(LAYOUT, 1, side)
    pool = make_pool(side, 64, 16)
    slots = torch.tensor([3, slot])
    with pytest.raises(IndexError, match=f"{slot}.* inside a pool of 112"):
        RowSource(pool, plan).gather(range(4), slots)
    with pytest.raises(IndexError, match="inside a pool of 112"):
        RowTarget(pool, plan).scatter(range(1), slots, torch.zeros(2 * 40, dtype=torch.bfloat16))


def test_rows_are_gathered_in_place() -> None:
    side = Side(LAYOUT)
    (plan,) = plans_into(LAYOUT, 1, side)
    pool = make_pool(side, 64, 16)
    source, slots = RowSource(pool, plan), torch.arange(5)
    buffer = torch.full((1000,), 7, dtype=torch.uint8)
    out = buffer[: 5 * source.token_bytes(range(2))].view(torch.bfloat16)
    assert source.gather(range(2), slots, out).data_ptr() == buffer.data_ptr()
    assert torch.equal(out, source.gather(range(2), slots))
    assert bool((buffer[out.nbytes :] == 7).all())
    with pytest.raises(ValueError, match="is no room for"):
        source.gather(range(2), slots, out[1:])
