"""From pages to the sender, over a loopback pipe."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import prefill_node.feeder
from kv_transfer.handoff import TARGET_KV
from kv_transfer.loopback import loopback_pair
from kv_transfer.reshard import Side, reshard
from kv_transfer.rows import RowSource
from kv_transfer.sender import HandoffSender
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.v1 import handoff_pb2
from prefill_node.feeder import RowFeeder
from tests.fakes.wait import wait_for

LAYER = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 1, 4)


class Wire:
    """A feeder, its sender, and what left them."""

    def __init__(self) -> None:
        self.messages: list[handoff_pb2.HandoffMessage] = []
        self.ended: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.kv = KvPool(KvLayout((LAYER, LAYER), torch.float32), 8, 4)
        for data in self.kv.data:
            data.copy_(torch.arange(data.numel(), dtype=torch.float32).view(data.shape))
        pipe, self.far_end = loopback_pair(max_messages=64, timeout_s=5.0)
        self.sender = HandoffSender(
            pipe,
            self._post,
            on_terminal=lambda ticket, ack: self.ended.append((ticket, ack.WhichOneof("body") or "")),
            on_failed=lambda ticket, reason: self.ended.append((ticket, reason)),
            on_link_lost=lambda reason: None,
        )
        source = RowSource(self.kv, reshard(Side(self.kv.layout), Side(self.kv.layout)))
        self.feeder = RowFeeder(
            self.sender, source, torch.device("cpu"), lambda ticket, reason: self.refused.append((ticket, reason))
        )

    def _post(self, message: handoff_pb2.HandoffMessage) -> None:
        self.gate.wait(5.0)
        self.messages.append(message)

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.messages]


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.gate.set()
    made.sender.close(5.0)
    made.feeder.close(5.0)


def test_rows_leave_in_pieces_and_in_order(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_node.feeder, "PIECE_BYTES", 3 * 2 * 8 * 4)  # three tokens of both layers
    slots = torch.tensor([9, 2, 30, 31, 4, 17, 0], dtype=torch.int32)
    wire.feeder.begin("t", 5, 7)
    wire.feeder.rows("t", TARGET_KV, range(2), slots, 5)
    wire.feeder.state("t", handoff_pb2.State(first_token_id=3), torch.ones(1, 2))
    wait_for(lambda: len(wire.messages) == 5)
    assert wire.kinds() == ["begin", "chunk", "chunk", "chunk", "state"]
    got = []
    for message in wire.messages[1:4]:
        data = torch.empty(message.chunk.num_bytes // 4)
        wire.far_end.recv(data)
        got.append((message.chunk.first_token, message.chunk.num_tokens, data))
    assert [(first, count) for first, count, _ in got] == [(5, 3), (8, 3), (11, 1)]
    for (_, count, data), start in zip(got, (0, 3, 6), strict=True):
        assert torch.equal(data, wire.kv.gather(range(2), slots[start : start + count]))


def test_giving_up_behind_a_busy_link_skips_the_rows_but_tells_the_receiver(wire: Wire) -> None:
    wire.gate.clear()
    wire.feeder.begin("busy", 0, 1)
    wire.feeder.begin("t", 0, 8)
    wire.feeder.rows("t", TARGET_KV, range(2), torch.arange(8, dtype=torch.int32), 0)
    wire.feeder.abort("t", "the caller went away")
    wire.gate.set()
    wait_for(lambda: "abort" in wire.kinds())
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "t"] in (["abort"], ["begin", "abort"])
    wire.sender.acknowledge(handoff_pb2.HandoffAck(ticket="t", failed=handoff_pb2.Failed(reason="aborted")))
    assert wire.ended == [("t", "failed")]


def test_a_dead_link_refuses_to_begin(wire: Wire) -> None:
    wire.sender.link_lost("pulled")
    wire.feeder.begin("t", 0, 4)
    wait_for(lambda: bool(wire.refused))
    assert wire.refused[0][0] == "t"
    assert "pulled" in wire.refused[0][1]
    wire.sender.close(5.0)
    wire.feeder.close(5.0)
    wire.feeder.begin("u", 0, 4)
    assert wire.refused[1] == ("u", "the link is closed")


def test_rows_that_cannot_be_read_fail_their_ticket_only(wire: Wire) -> None:
    wire.feeder.begin("bad", 0, 1)
    wire.feeder.rows("bad", TARGET_KV, range(2), torch.tensor([999], dtype=torch.int32), 0)
    wire.feeder.begin("good", 0, 1)
    wire.feeder.rows("good", TARGET_KV, range(2), torch.tensor([1], dtype=torch.int32), 0)
    wait_for(lambda: len([m for m in wire.messages if m.ticket == "good"]) == 2)
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "good"] == ["begin", "chunk"]
    # Begin may still have been queued when the Abort took its place.
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "bad"] in (["abort"], ["begin", "abort"])
