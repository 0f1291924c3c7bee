"""Hand-offs between nodes of any numbers of ranks: every rank's pool holds what that of one rank would, byte for byte.

Mutants that fail here: every source that holds a head or a latent sends it; a message counts before the lanes' parts
have come; a follower gathers before it has run what rank 0 has run; nobody looks at a lane's checksum; one that does
not hold, or a lane that breaks, ends hand-offs beside its own; lanes are not sealed; a silent follower is waited for.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from pydantic import ValidationError

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV
from kv_transfer.lanes import leader
from kv_transfer.lanes.ends import LaneEnds
from kv_transfer.lanes.pairing import degrees as degrees_of_pair
from kv_transfer.lanes.pairing import wanted_by
from kv_transfer.transports.base import MESSAGE_BYTES, Pending, byte_view
from kv_transfer.transports.gloo import GlooTransport
from paceline.config import NodeConfig
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.v1.handoff_pb2 import PairRequest, PairResponse, State
from tests.kv_transfer.layout.sharded import cut, fill, random_rows, read
from tests.support.laned_link import LanedLink, laned_link
from tests.support.thread_ranks import family_spec, ranks_spec

torch.set_num_threads(1)

FIRST, TOTAL = 5, 33
DRAFT = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 3, 8)
LATENTS = (*[KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24)] * 3, KvLayer(LayerKind.MLA, LayerOwner.DRAFT, 1, 24))
Degrees = tuple[int, int]


def heads(count: int, width: int = 8) -> tuple[KvLayer, ...]:
    return (*[KvLayer(LayerKind.GQA, LayerOwner.TARGET, count, width)] * 3, DRAFT)


MODELS: dict[str, tuple[ModelSpec, tuple[KvLayer, ...]]] = {
    "8 heads": (ranks_spec(8), heads(8)),
    "2 heads": (ranks_spec(2), heads(2)),
    "latents": (family_spec("deepseek_v3"), LATENTS),
}


def share(rows: list[torch.Tensor], pool: KvPool, degree: int, rank: int) -> list[torch.Tensor]:
    """What a rank holds: its heads of the target, on rank 0 the drafter's layers."""
    target = [cut(full, degree, rank) for full in rows[:3]]
    return [*target, *rows[3:]] if rank == 0 else target


def plain_pools(link: LanedLink, end: int) -> list[KvPool]:
    node = link.nodes[end]
    return [link.lanes[end].own_pool, *node.theirs]


def fill_source(link: LanedLink, rows: list[torch.Tensor], degree: int) -> None:
    for rank, pool in enumerate(plain_pools(link, 0)):
        fill(pool, link.source_slots[: len(rows[0])], share(rows, pool, degree, rank))


def send(link: LanedLink, ticket: str, tokens: range, upto: int | None = None) -> None:
    """All of a hand-off; or, with ``upto``, that many of its rows and no State."""
    link.reserve(ticket, tokens)
    link.feeder.begin(ticket, tokens)
    last = tokens.stop if upto is None else upto
    for byte_class, layers in ((TARGET_KV, range(1)), (TARGET_KV, range(1, 3)), (DRAFT_KV, range(3, 4))):
        for start in range(tokens.start, last, 7):
            link.rows(ticket, byte_class, layers, range(start, min(start + 7, last)))
    if upto is None:
        link.feeder.state(ticket, State(first_token_id=5), None)


def check_landed(link: LanedLink, rows: list[torch.Tensor], degree: int, tokens: range) -> None:
    for rank, pool in enumerate(plain_pools(link, 1)):
        wanted = share(rows, pool, degree, rank)
        for got, full in zip(read(pool, link.landing.slots[tokens.start : tokens.stop]), wanted, strict=True):
            assert torch.equal(byte_view(got.contiguous()), byte_view(full[tokens.start : tokens.stop].contiguous()))
        before = read(pool, link.landing.slots[: tokens.start])
        assert not any(bool(part.any()) for part in before)  # rows that decode said it has are not written


@pytest.mark.parametrize("model", MODELS)
def test_every_pair_of_degrees_gives_the_pools_of_one_rank(model: str) -> None:
    """And the bytes on the wire are the formula's (algorithms.md H4): a head goes to each destination that keeps it,
    once; a latent to each destination."""
    spec, layers = MODELS[model]
    layout, tokens = KvLayout(layers, torch.bfloat16), range(FIRST, TOTAL)
    rows = random_rows(layout, TOTAL, 3)
    for degrees in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if degrees == (1, 1):
            continue
        with laned_link(spec, layers, degrees, sealed=degrees == (4, 2)) as link:
            fill_source(link, rows, degrees[0])
            send(link, "t", tokens)
            assert link.landing.outcome("t") == "ready", degrees
            check_landed(link, rows, degrees[1], tokens)
            link.wait_ended("t")
            copies = degrees[1] if model == "latents" else max(1, degrees[1] // spec.num_kv_heads)
            wanted = {
                TARGET_KV: len(tokens) * copies * layout.token_bytes(LayerOwner.TARGET),
                DRAFT_KV: len(tokens) * layout.token_bytes(LayerOwner.DRAFT),
            }
            for counts in (link.sender.bytes_sent("t"), link.landing.handoffs["t"].bytes_by_class):
                assert {byte_class: counts[byte_class] for byte_class in wanted} == wanted, degrees


def test_float_rows_arrive_rounded() -> None:
    spec, layers = MODELS["8 heads"]
    rows = random_rows(KvLayout(layers, torch.float32), TOTAL, 3)
    with laned_link(spec, layers, (2, 4), dtypes=(torch.float32, torch.bfloat16)) as link:
        fill_source(link, rows, 2)
        send(link, "t", range(TOTAL))
        assert link.landing.outcome("t") == "ready"
        check_landed(link, [full.to(torch.bfloat16) for full in rows], 4, range(TOTAL))


def test_many_messages_of_many_hand_offs_stay_in_step() -> None:
    """Chunks of several full messages, more than there are buffers; one hand-off in the midst is unknown to decode, and
    one is given up: their bytes come, and are thrown away."""
    spec, width = ranks_spec(2), 16384
    layers = (*[KvLayer(LayerKind.GQA, LayerOwner.TARGET, 2, width)] * 3, DRAFT)
    rows = random_rows(KvLayout(layers, torch.bfloat16), 200, 3)
    assert 200 * 2 * width * 2 > 3 * MESSAGE_BYTES  # of a layer of one rank
    with laned_link(spec, layers, (2, 2)) as link:
        fill_source(link, rows, 2)
        for ticket in ("a", "unknown", "b", "aborted", "c"):
            link.reserve(ticket, range(200))
            link.feeder.begin(ticket, range(200))
            if ticket == "unknown":
                del link.landing.handoffs[ticket]
            for layers_sent in (range(1), range(1, 3)):
                link.rows(ticket, TARGET_KV, layers_sent, range(200))
            link.rows(ticket, DRAFT_KV, range(3, 4), range(200))
            if ticket == "aborted":
                time.sleep(0.05)
                link.feeder.abort(ticket, "not wanted")
            link.feeder.state(ticket, State(first_token_id=5), None)
        outcomes = [link.landing.outcome(ticket) for ticket in ("a", "b", "c")]
        assert outcomes == ["ready"] * 3
        assert link.receiver.alive
        check_landed(link, rows, 2, range(200))


class Late:
    """When followers have run what rank 0 has run."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self, number: int) -> None:
        assert number == 7
        assert self.event.wait(10)


def test_a_follower_gathers_what_rank_0_has_run() -> None:
    """It is late with the command that writes the rows."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    late = Late()
    with laned_link(spec, layers, (2, 1), ran=(late.wait, late.wait)) as link:
        link.nodes[0].followers._done = 7
        send(link, "t", range(TOTAL))
        time.sleep(0.2)
        fill_source(link, rows, 2)
        late.event.set()
        assert link.landing.outcome("t") == "ready"
        for got, full in zip(read(link.lanes[1].own_pool, link.landing.slots[:TOTAL]), rows[:3], strict=False):
            assert torch.equal(got[:, :, -1], full[:, :, -1])  # the head of the follower


def test_a_message_counts_when_every_rank_has_stored_it() -> None:
    """A follower of decode is late with the command behind which it may store."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    late = Late()
    with laned_link(spec, layers, (1, 2), ran=(late.wait, late.wait)) as link:
        link.nodes[1].followers._done = 7
        fill_source(link, rows, 1)
        send(link, "t", range(TOTAL))
        time.sleep(0.2)
        assert not link.landing.outcomes
        assert link.landing.handoffs["t"].status == "sending"
        late.event.set()
        assert link.landing.outcome("t") == "ready"
        check_landed(link, rows, 2, range(TOTAL))


@pytest.mark.parametrize("side", [0, 1])
def test_a_lane_that_breaks_fails_the_hand_offs_of_its_link_in_time(side: int) -> None:
    """The transports of a follower are cut in the midst: both ends are told, and no page is written any more."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with laned_link(spec, layers, (2, 2), timeout_s=1.0) as link:
        fill_source(link, rows, 2)
        send(link, "t", range(TOTAL), upto=20)
        link.nodes[side].followers.lanes[0].end(link.lanes[side]._link)
        send(link, "u", range(TOTAL))
        began = time.monotonic()
        assert link.landing.outcome("t") != "ready"
        for ticket in ("t", "u"):
            link.wait_ended(ticket)
        assert time.monotonic() - began < 4
        assert not link.nodes[side].broken
        assert not link.nodes[side].followers.failure  # the node goes on
        assert not link.receiver.alive
        assert "ready" not in link.landing.outcomes.values()


def test_a_lane_that_breaks_leaves_the_other_links_of_a_decode_node() -> None:
    """Two prefill nodes send into the same ranks; the lanes of one are cut."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with (
        laned_link(spec, layers, (2, 2), timeout_s=1.0) as hurt,
        laned_link(spec, layers, (2, 2), timeout_s=1.0, into=hurt.nodes[1]) as whole,
    ):
        for link, ticket in ((hurt, "hurt"), (whole, "whole")):
            fill_source(link, rows, 2)
            send(link, ticket, range(TOTAL), upto=20)
        hurt.nodes[0].followers.lanes[0].end(hurt.lanes[0]._link)
        send(hurt, "late", range(TOTAL))
        assert hurt.landing.outcome("hurt") != "ready"
        send(whole, "t", range(TOTAL))
        assert whole.landing.outcome("t") == "ready"
        assert whole.receiver.alive
        check_landed(whole, rows, 2, range(TOTAL))


def test_a_byte_that_changes_on_a_lane_fails_its_hand_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    hit: list[int] = []

    def send_changed(ends: LaneEnds, number: int, layers: range, count: int) -> Pending:
        for lane in ends._lanes:
            if lane.rows.plan.source.rank == 1 and not hit:
                hit.append(number)
                lane.message(number, layers, count)[3] ^= 1
        return send_whole(ends, number, layers, count)

    send_whole = LaneEnds.send
    with laned_link(spec, layers, (2, 2), checksums=True) as link:
        fill_source(link, rows, 2)
        send(link, "before", range(TOTAL))
        assert link.landing.outcome("before") == "ready"
        monkeypatch.setattr(LaneEnds, "send", send_changed)
        send(link, "hurt", range(TOTAL))
        send(link, "after", range(TOTAL))
        assert "rank 1: checksum of 7 rows from rank 1 for rank 1" in link.landing.outcome("hurt")
        assert link.landing.outcome("after") == "ready"
        assert link.receiver.alive
        check_landed(link, rows, 2, range(TOTAL))


def test_rows_on_lanes_are_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo gets of any pair of ranks does not show the rows, which are all alike."""
    spec, layers = MODELS["8 heads"]
    rows = [torch.ones_like(full) for full in random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)]
    seen: list[bytes] = []

    def start_send(transport: GlooTransport, tensor: torch.Tensor) -> Pending:
        seen.append(byte_view(tensor).numpy().tobytes())
        return start(transport, tensor)

    start = GlooTransport.start_send
    monkeypatch.setattr(GlooTransport, "start_send", start_send)
    plain = byte_view(torch.ones(8, dtype=torch.bfloat16)).numpy().tobytes()
    for sealed in (False, True):
        seen.clear()
        with laned_link(spec, layers, (2, 4), sealed=sealed) as link:
            fill_source(link, rows, 2)
            send(link, "t", range(TOTAL))
            assert link.landing.outcome("t") == "ready"
        assert any(plain in message for message in seen) is not sealed


def test_a_silent_follower_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive and says nothing, in the midst of a hand-off."""
    monkeypatch.setattr(leader, "RANK_TIMEOUT_S", 0.3)
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    goes_on = threading.Event()

    def silent(number: int) -> None:
        assert goes_on.wait(10)

    with laned_link(spec, layers, (2, 1), ran=(silent, silent), timeout_s=0.4) as link:
        fill_source(link, rows, 2)
        began = time.monotonic()
        send(link, "t", range(TOTAL))
        link.wait_ended("t")
        assert link.landing.outcome("t") != "ready"
        assert time.monotonic() - began < 3
        assert "does not answer about its lanes" in link.nodes[0].followers.failure
        goes_on.set()


def test_a_follower_that_is_gone_ends_the_wait_at_once() -> None:
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with laned_link(spec, layers, (2, 1)) as link:
        fill_source(link, rows, 2)
        link.nodes[0].ends[0].shut()
        began = time.monotonic()
        send(link, "t", range(TOTAL))
        link.wait_ended("t")
        assert time.monotonic() - began < 2
        assert "ranks of this node are lost" in link.nodes[0].followers.failure


def test_both_nodes_must_want_the_same() -> None:
    """Nodes of one rank each have no lanes, whatever they want; a node that says nothing wants what is without."""
    direct, other = PairRequest(ranks=2, rank_links="direct"), PairResponse(ranks=4, rank_links="through-0")
    with pytest.raises(PairingRefused, match=r"(?s)rank_links differ.*'direct' ranks=2.*'through-0' ranks=4"):
        degrees_of_pair(direct, other)
    with pytest.raises(PairingRefused, match="through-0"):
        degrees_of_pair(direct, PairResponse())
    assert degrees_of_pair(direct, PairResponse(rank_links="direct")) == (2, 1)
    assert degrees_of_pair(PairRequest(ranks=2, rank_links="through-0"), PairResponse()) is None
    assert degrees_of_pair(PairRequest(rank_links="direct"), PairResponse(ranks=1)) is None
    auto = PairRequest(ranks=2, rank_links="auto")
    assert degrees_of_pair(auto, PairResponse(ranks=4, rank_links="direct")) == (2, 4)
    assert degrees_of_pair(auto, other) is None
    assert wanted_by(NodeConfig(tp=2, device="cuda")) == "through-0"
    with pytest.raises(ValidationError, match="'direct' is for ranks on CPUs"):
        NodeConfig(tp=2, device="cuda", rank_links="direct")
