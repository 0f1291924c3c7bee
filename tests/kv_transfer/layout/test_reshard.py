"""Reshard plans against whole tensors: cut, move, compare, for every pair of degrees."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.layout.reshard import Side, plans_from, plans_into, reshard, sending_rank
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from tests.kv_transfer.layout.sharded import cut

torch.set_num_threads(1)

DEGREES = (1, 2, 4, 8)
TOKENS = 3


def gqa(heads: int, width: int = 4, owner: LayerOwner = LayerOwner.TARGET) -> KvLayer:
    return KvLayer(LayerKind.GQA, owner, heads, width)


def mla(width: int, owner: LayerOwner = LayerOwner.TARGET) -> KvLayer:
    return KvLayer(LayerKind.MLA, owner, 1, width)


def layout(*layers: KvLayer, dtype: torch.dtype = torch.bfloat16) -> KvLayout:
    return KvLayout(layers, dtype)


def divides(heads: int, degree: int) -> bool:
    return heads % degree == 0 or degree % heads == 0


PAIRS = [
    (heads, source, dest)
    for heads, source, dest in itertools.product((1, 2, 3, 4, 8), DEGREES, DEGREES)
    if divides(heads, source) and divides(heads, dest)
]
LATENT = layout(mla(6), mla(6), mla(10))
MIXED = layout(gqa(8), mla(6), gqa(4, 2), gqa(2, 8), gqa(1, 8))
LAYOUTS = {f"{h} heads {s}>{d}": (layout(gqa(h), gqa(h, 2)), s, d) for h, s, d in PAIRS}
LAYOUTS |= {f"latent {s}>{d}": (LATENT, s, d) for s, d in itertools.product(DEGREES, DEGREES)}
LAYOUTS |= {f"mixed {s}>{d}": (MIXED, s, d) for s, d in itertools.product(DEGREES, DEGREES)}
every_pair = pytest.mark.parametrize(("whole", "sources", "dests"), LAYOUTS.values(), ids=LAYOUTS.keys())


def full_tensors(whole: KvLayout) -> list[Tensor]:
    """For each layer [tokens, K and V or latent, heads, width], no two elements of a layer alike."""
    tensors = []
    for layer in whole.layers:
        planes, heads = (1, 1) if layer.kind is LayerKind.MLA else (2, layer.num_kv_heads)
        shape = (TOKENS, planes, heads, layer.head_dim)
        tensors.append(torch.arange(1, 1 + TOKENS * planes * heads * layer.head_dim).view(shape))
    return tensors


@every_pair
def test_every_destination_element_is_written_once_with_its_value(whole: KvLayout, sources: int, dests: int) -> None:
    full = full_tensors(whole)
    held = [[cut(tensor, sources, rank) for tensor in full] for rank in range(sources)]
    for rank in range(dests):
        dest = Side(whole, dests, rank)
        wanted = [cut(tensor, dests, rank) for tensor in full]
        got = [torch.zeros_like(tensor) for tensor in wanted]
        writes = [torch.zeros_like(tensor) for tensor in wanted]
        for source in range(sources):
            for part in reshard(Side(whole, sources, source), dest).slices:
                assert part.num_heads > 0
                assert part.source_head + part.num_heads <= held[source][part.layer].shape[2]  # it owns what it sends
                rows = held[source][part.layer][:, :, part.source_head : part.source_head + part.num_heads]
                place = slice(part.dest_head, part.dest_head + part.num_heads)
                assert got[part.layer][:, :, place].shape == rows.shape
                assert part.width == rows.shape[3]
                got[part.layer][:, :, place] = rows
                writes[part.layer][:, :, place] += 1
        for mine, theirs, times in zip(got, wanted, writes, strict=True):
            assert torch.equal(mine, theirs)
            assert bool((times == 1).all())


@every_pair
def test_bytes_over_all_pairs_are_what_the_destinations_hold(whole: KvLayout, sources: int, dests: int) -> None:
    plans = [plan for rank in range(dests) for plan in plans_into(whole, sources, Side(whole, dests, rank))]
    # algorithms.md H4, times the copies that destinations keep: a latent on every rank, a head on dests / heads.
    elems = sum(
        dests * x.head_dim if x.kind is LayerKind.MLA else 2 * max(x.num_kv_heads, dests) * x.head_dim
        for x in whole.layers
    )
    assert sum(plan.wire.token_bytes(LayerOwner.TARGET) for plan in plans) == 2 * elems


@every_pair
def test_pools_of_the_ranks_hold_their_share(whole: KvLayout, sources: int, dests: int) -> None:
    for rank in range(dests):
        side = Side(whole, dests, rank)
        for index, (tensor, layer) in enumerate(zip(full_tensors(whole), side.local.layers, strict=True)):
            share = cut(tensor, dests, rank)
            assert layer.row_elems * TOKENS == share.numel()
            assert torch.equal(share, tensor[:, :, side.heads(index).start : side.heads(index).stop])


@every_pair
def test_the_ranks_that_hold_a_head_send_it_equally_often(whole: KvLayout, sources: int, dests: int) -> None:
    plans = [reshard(Side(whole, sources, s), Side(whole, dests, d)) for s in range(sources) for d in range(dests)]
    for index in range(len(whole.layers)):
        holders: dict[int, list[int]] = {}
        for rank in range(sources):
            for head in Side(whole, sources, rank).heads(index):
                holders.setdefault(head, []).append(rank)
        sent: Counter[tuple[int, int]] = Counter()
        for plan in plans:
            for part in (part for part in plan.slices if part.layer == index):
                first = plan.source.heads(index).start + part.source_head
                sent.update((head, plan.source.rank) for head in range(first, first + part.num_heads))
        for head, ranks in holders.items():
            counts = [sent[head, rank] for rank in ranks]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == max(1, dests // len(holders))


@every_pair
def test_a_pair_has_few_slices_in_order_of_layer(whole: KvLayout, sources: int, dests: int) -> None:
    for rank in range(dests):
        dest = Side(whole, dests, rank)
        plans = plans_into(whole, sources, dest)
        for plan in plans:
            layers = [part.layer for part in plan.slices]
            assert layers == sorted(set(layers))
        # As many sources as the layer with the most heads for this rank needs, and no more.
        source = Side(whole, sources)
        layers_of = range(len(whole.layers))
        assert len(plans) == max(-(-len(dest.heads(i)) // len(source.heads(i))) for i in layers_of)
        if sources == dests:
            assert [plan.source.rank for plan in plans] == [rank]


@every_pair
def test_both_ends_derive_the_same_plans(whole: KvLayout, sources: int, dests: int) -> None:
    sending = [p for rank in range(sources) for p in plans_from(Side(whole, sources, rank), whole, dests)]
    receiving = [p for rank in range(dests) for p in plans_into(whole, sources, Side(whole, dests, rank))]
    assert sorted(p.name for p in sending) == sorted(p.name for p in receiving)
    assert {p.name: p.slices for p in sending} == {p.name: p.slices for p in receiving}
    assert len({p.name for p in sending}) == len(sending)


@every_pair
def test_every_latent_comes_from_one_source(whole: KvLayout, sources: int, dests: int) -> None:
    shared = [i for i, layer in enumerate(whole.layers) if layer.kind is LayerKind.MLA]
    for rank in range(dests):
        dest = Side(whole, dests, rank)
        for plan in plans_into(whole, sources, dest):
            crossing = {part.layer for part in plan.slices}
            lead = plan.source.rank == rank * sources // dests
            assert len(crossing) == len(whole.layers) if lead else not crossing & set(shared)
        assert {sending_rank(sources, dest, i, 0) for i in shared} <= {rank * sources // dests}


LAYERS = st.one_of(
    st.builds(gqa, st.integers(1, 12), st.integers(1, 5)), st.builds(mla, st.integers(1, 9))
)  # degrees that divide neither each other nor a power of two, too


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 12))
def test_any_degrees_move_everything_once_or_are_refused(layers: list[KvLayer], sources: int, dests: int) -> None:
    whole = layout(*layers)
    heads = [1 if x.kind is LayerKind.MLA else x.num_kv_heads for x in layers]
    if not all(divides(h, degree) for h in heads for degree in (sources, dests)):
        with pytest.raises(ConfigError, match="shard_degree"):
            [reshard(Side(whole, sources), Side(whole, dests))]
        return
    test_every_destination_element_is_written_once_with_its_value(whole, sources, dests)
    test_the_ranks_that_hold_a_head_send_it_equally_often(whole, sources, dests)


def test_unsharded_sides_move_whole_rows_under_no_name() -> None:
    plan = reshard(Side(MIXED), Side(MIXED))
    assert plan.wire == MIXED
    assert plan.name == ""
    assert [part.num_heads for part in plan.slices] == [8, 1, 4, 2, 1]  # neighbouring heads are one slice


def test_the_name_tells_plans_apart() -> None:
    plan = reshard(Side(MIXED, 2, 1), Side(MIXED, 1))
    assert plan.name.startswith("1/2>0/1#")
    wider = layout(gqa(8, 6), *MIXED.layers[1:])
    others = [
        reshard(Side(MIXED, 2, 0), Side(MIXED, 1)),
        reshard(Side(MIXED, 1), Side(MIXED, 2, 1)),
        reshard(Side(wider, 2, 1), Side(wider, 1)),
        reshard(Side(KvLayout(MIXED.layers, torch.float32), 2, 1), Side(KvLayout(MIXED.layers, torch.float32), 1)),
    ]
    assert len({plan.name, *(other.name for other in others)}) == 5
    digests = [name.partition("#")[2] for name in (plan.name, *(other.name for other in others))]
    assert len(set(digests)) == 5


def test_rows_that_are_cast_travel_as_the_destination_keeps_them() -> None:
    rounded = reshard(Side(KvLayout(MIXED.layers, torch.float32), 2, 1), Side(MIXED, 1))
    same = reshard(Side(MIXED, 2, 1), Side(MIXED, 1))
    assert rounded.wire == same.wire
    assert rounded.wire.dtype is torch.bfloat16
    assert rounded.name == same.name  # decode reserves before it knows who sends


@pytest.mark.parametrize(
    ("degree", "rank", "key", "words"),
    [
        (2, 0, "shard_degree", "2 ranks neither divide nor are a multiple of the 3 KV heads of layer 1"),
        (4, 0, "shard_degree", "target:gqa:3x4"),
        (0, 0, "shard_degree", "at least 1"),
        (3, 3, "shard_rank", "3 is outside the 3 ranks"),
        (3, -1, "shard_rank", "outside"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_by_name(degree: int, rank: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Side(layout(mla(5), gqa(3)), degree, rank)
    assert refused.value.key == key


def test_sides_of_different_models_or_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layout: prefill holds bfloat16 target:gqa:4x4"):
        reshard(Side(layout(gqa(4))), Side(layout(gqa(2))))
    for source, dest in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        with pytest.raises(ConfigError, match="dtype: rows of"):
            reshard(Side(layout(gqa(4), dtype=source)), Side(layout(gqa(4), dtype=dest)))


def test_layers_of_the_drafter_go_from_rank_0_to_rank_0_whole() -> None:
    """Three heads, which neither side could deal, and a latent."""
    whole = layout(gqa(4), gqa(3, owner=LayerOwner.DRAFT), mla(6, LayerOwner.DRAFT))
    for source, dest in itertools.product(range(2), range(4)):
        plan = reshard(Side(whole, 2, source), Side(whole, 4, dest))
        drafts = [(part.layer, part.num_heads) for part in plan.slices if part.layer]
        assert drafts == ([] if source or dest else [(1, 3), (2, 1)])
    assert [len(Side(whole, 4, rank).local.layers) for rank in range(4)] == [3, 1, 1, 1]


def test_no_pair_moves_more_of_a_layer_than_the_first_ranks_do() -> None:
    """A message of rank 0 to rank 0 bounds that of every other pair (kv_transfer/lanes)."""
    for whole, sources, dests in LAYOUTS.values():
        lead = reshard(Side(whole, sources), Side(whole, dests)).wire
        for rank in range(dests):
            for plan in plans_into(whole, sources, Side(whole, dests, rank)):
                pairs = zip(plan.wire.layers, lead.layers, strict=True)
                assert all(layer.row_elems <= most.row_elems for layer, most in pairs)
