"""Hand-offs between nodes of any numbers of ranks: every rank's pool holds what that of one rank would, byte for byte.

Mutants that fail here: every source that holds a head or a latent sends it; a message counts before the lanes' parts
have come; a follower gathers before it has run what rank 0 has run; lanes are not sealed.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from pydantic import ValidationError

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV
from kv_transfer.lanes.pairing import degrees as degrees_of_pair
from kv_transfer.lanes.pairing import wanted_by
from kv_transfer.transports.base import MESSAGE_BYTES, Pending, byte_view
from kv_transfer.transports.gloo import GlooTransport
from paceline.config import NodeConfig
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import PairRequest, PairResponse, State
from tests.kv_transfer.layout.sharded import random_rows, read
from tests.support.laned_link import laned_link
from tests.support.laned_rows import DRAFT, MODELS, TOTAL, check_landed, fill_source, send
from tests.support.thread_ranks import ranks_spec

torch.set_num_threads(1)

FIRST = 5


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
    assert wanted_by(NodeConfig(tp=2, attention_dp=2)) == "through-0"  # each rank has rows of its own
    with pytest.raises(ValidationError, match="'direct' is for CPUs whose ranks share"):
        NodeConfig(tp=2, device="cuda", rank_links="direct")
    with pytest.raises(ValidationError, match="attention_dp 2"):
        NodeConfig(tp=2, attention_dp=2, rank_links="direct")
