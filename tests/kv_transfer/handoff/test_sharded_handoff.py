"""A hand-off between sides of several ranks, one link a pair: what an unsharded one gives, bit for bit, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV
from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.base import Transport, byte_view
from kv_transfer.transports.loopback import loopback_pair
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import store_pair
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import Begin, HandoffMessage
from tests.kv_transfer.layout.sharded import HIDDEN_SIZE, Sharded, cut, random_rows, read

torch.set_num_threads(1)

LAYOUT = KvLayout(
    (
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 4, 8),
        KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 8, 4),
        KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 1, 8),
        KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 2, 8),
    ),
    torch.bfloat16,
)
FLOAT = KvLayout(LAYOUT.layers, torch.float32)
FIRST, TOTAL = 5, 33
HOST = "127.0.0.1"
Degrees = tuple[int, int]


def gloo_pair(link_ids: Iterator[int]) -> tuple[Transport, Transport]:
    link_id, stores = f"link/{next(link_ids)}", store_pair(5.0)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(open_transport, "gloo", stores[i], link_id, i, HOST, 5.0) for i in (0, 1)]
        return ends[0].result(20), ends[1].result(20)


_link_ids = itertools.count()


@pytest.fixture(params=["loopback", "gloo"])
def open_link(request: pytest.FixtureRequest) -> Callable[[], tuple[Transport, Transport]]:
    return loopback_pair if request.param == "loopback" else partial(gloo_pair, _link_ids)


@contextmanager
def sharded(
    degrees: Degrees,
    open_link: Callable[[], tuple[Transport, Transport]] = loopback_pair,
    page_sizes: tuple[int, int] = (16, 7),
    *,
    layout: KvLayout = LAYOUT,
    dest_layout: KvLayout | None = None,
    shifted: bool = False,
) -> Iterator[Sharded]:
    rows = random_rows(layout, TOTAL, 3)
    order = (lambda place: (place + 1) % degrees[0]) if shifted else (lambda place: place)
    made = Sharded(rows, layout, degrees, page_sizes, open_link, first=FIRST, dest_layout=dest_layout, order=order)
    try:
        yield made
    finally:
        made.close()


def send_all(made: Sharded, *, draft: bool = True) -> None:
    """Every part at the same time, as the ranks of a side would."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda part: made.send(part, draft=draft), made.senders))
    made.finish()


def unsharded_rows(layout: KvLayout, dest_layout: KvLayout | None) -> list[torch.Tensor]:
    """What one node hands to one other: by layer, whole."""
    with sharded((1, 1), page_sizes=(16, 16), layout=layout, dest_layout=dest_layout) as made:
        send_all(made)
        rank = made.decode[0]
        return read(rank.pool, rank.slots)


def check_landed(made: Sharded, layout: KvLayout = LAYOUT, dest_layout: KvLayout | None = None) -> None:
    """Every decode rank holds its heads of what an unsharded hand-off gives, and one copy of the hidden row."""
    wanted = unsharded_rows(layout, dest_layout)
    for rank, landing in zip(made.decode, made.landings, strict=True):
        assert rank.outcome == [None]
        assert landing.draft_complete
        for got, full in zip(read(rank.pool, rank.slots), wanted, strict=True):
            share = cut(full, rank.side.degree, rank.side.rank)
            assert torch.equal(byte_view(got[FIRST:].contiguous()), byte_view(share[FIRST:].contiguous()))
            assert bool((got[:FIRST] == 77.0).all())  # rows that decode said it has are not written
        [hidden] = landing.hidden
        assert torch.equal(hidden, made.hidden.to(hidden.dtype))
    assert all(rank.outcome == [None] for rank in made.prefill)


@pytest.mark.parametrize(
    ("degrees", "shifted"), [((2, 1), False), ((1, 2), False), ((2, 2), True), ((4, 2), False), ((2, 4), True)]
)
def test_any_degrees_give_what_an_unsharded_hand_off_gives(
    degrees: Degrees, shifted: bool, open_link: Callable[[], tuple[Transport, Transport]]
) -> None:
    with sharded(degrees, open_link, shifted=shifted) as made:
        send_all(made)
        check_landed(made)


@pytest.mark.parametrize("page_sizes", [(16, 64), (64, 1), (1, 7), (3, 16)])
@pytest.mark.parametrize("degrees", [(8, 1), (1, 8), (8, 8), (8, 2)])
def test_more_ranks_than_heads_and_other_page_sizes(degrees: Degrees, page_sizes: tuple[int, int]) -> None:
    with sharded(degrees, page_sizes=page_sizes) as made:
        send_all(made)
        check_landed(made)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)])
def test_float_rows_arrive_rounded_in_a_bfloat_pool(
    degrees: Degrees, open_link: Callable[[], tuple[Transport, Transport]]
) -> None:
    with sharded(degrees, open_link, layout=FLOAT, dest_layout=LAYOUT) as made:
        send_all(made)
        check_landed(made, FLOAT, LAYOUT)
        rows = random_rows(FLOAT, TOTAL, 3)
        for rank in made.decode:
            for got, full in zip(read(rank.pool, rank.slots), rows, strict=True):
                share = cut(full, degrees[1], rank.side.rank).to(torch.bfloat16)
                assert torch.equal(got[FIRST:], share[FIRST:])


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 4), (8, 2)])
def test_bytes_on_the_wire_are_the_formulas(degrees: Degrees) -> None:
    """algorithms.md H4: a head goes to each destination that keeps it, once; nothing else crosses."""
    with sharded(degrees) as made:
        send_all(made)
        counts = [sender.bytes_sent(part) for part, sender in made.senders.items()]
        landed = [handoff.bytes_by_class for landing in made.landings for handoff in landing.handoffs.values()]
    dests = degrees[1]
    target = 2 * 2 * (max(4, dests) * 8 + max(8, dests) * 4) + 2 * dests * 24
    draft = 2 * 2 * (max(1, dests) * 8 + max(2, dests) * 8)
    expected = {TARGET_KV: target * (TOTAL - FIRST), DRAFT_KV: draft * (TOTAL - FIRST), HIDDEN: 2 * HIDDEN_SIZE * dests}
    for byte_class, num_bytes in expected.items():
        assert sum(count.get(byte_class, 0) for count in counts) == num_bytes
        assert sum(count[byte_class] for count in landed) == num_bytes


def test_unsharded_messages_are_what_they_always_were() -> None:
    with sharded((1, 1)) as made:
        send_all(made)
        assert list(made.messages) == ["t"]
        begin = HandoffMessage(ticket="t", begin=Begin(num_tokens=TOTAL - FIRST, first_token=FIRST))
        assert made.messages["t"][0] == begin
        assert made.senders["t"].bytes_sent("t")[META] == sum(message.ByteSize() for message in made.messages["t"])


def test_begin_says_the_plan() -> None:
    with sharded((2, 1)) as made:
        send_all(made)
        names = {part: messages[0].begin.reshard for part, messages in made.messages.items()}
    assert set(names) == {"t/0-0", "t/1-0"}
    assert names["t/0-0"].startswith("0/2>0/1#")
    assert names["t/1-0"].startswith("1/2>0/1#")


@pytest.mark.parametrize("name", ["", "0/2>0/1#0123456789abcdef"])
def test_another_plan_is_refused_and_the_whole_fails(name: str) -> None:
    with sharded((2, 1)) as made:
        made.send("t/1-0")
        assert made.prefill[1].over.wait(10)
        assert not made.decode[0].over.is_set()  # one of two parts is not enough
        made.send("t/0-0", name=name, upto=FIRST)
        made.finish()
        [landing] = made.landings
        assert [handoff.status for handoff in landing.handoffs.values()] == [HandoffState.FAILED, HandoffState.READY]
        assert "cut by plan" in (made.decode[0].outcome[0] or "")
        assert bool((made.decode[0].pool.data[0][..., :2, :] == 77.0).all())


def test_a_part_that_fails_takes_the_others_with_it_when_they_are_over() -> None:
    with sharded((2, 1)) as made:
        made.send("t/0-0", upto=20)
        made.send("t/1-0", upto=20)
        made.wait_begun("t/0-0")
        made.wait_begun("t/1-0")
        made.senders["t/1-0"].abort("t/1-0", "the rank is gone")
        made.finish()
        [landing] = made.landings
        assert all(handoff.status is HandoffState.FAILED for handoff in landing.handoffs.values())
        assert made.decode[0].outcome == ["the rank is gone"]
        assert made.prefill[0].outcome[0] is not None


def test_a_part_that_never_began_is_given_up_too() -> None:
    with sharded((2, 1)) as made:
        made.send("t/0-0", upto=20)
        made.wait_begun("t/0-0")
        made.senders["t/0-0"].abort("t/0-0", "no use")
        assert made.decode[0].over.wait(10)
        assert made.decode[0].outcome == ["no use"]
        made.send("t/1-0", upto=FIRST)  # too late: told that nobody waits
        assert made.prefill[1].over.wait(10)
        assert made.prefill[1].outcome[0] is not None


def test_draft_rows_left_out_by_all_sources_are_no_error() -> None:
    with sharded((2, 2)) as made:
        send_all(made, draft=False)
        assert [rank.outcome for rank in made.decode] == [[None], [None]]
        assert not any(landing.draft_complete for landing in made.landings)
