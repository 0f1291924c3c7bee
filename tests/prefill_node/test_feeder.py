"""From pages to the sender, over a loopback pipe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kv_transfer.handoff.cut
import kv_transfer.handoff.outbox
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import NUM_BUFFERS
from paceline.v1 import handoff_pb2
from tests.fakes.wait import wait_for
from tests.support.feeder_wire import TOKEN_BYTES, Wire, open_wire


@pytest.fixture
def wire() -> Iterator[Wire]:
    with open_wire() as made:
        yield made


def test_rows_leave_in_pieces_and_in_order(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "MESSAGE_BYTES"):
        monkeypatch.setattr(kv_transfer.handoff.cut, name, 3 * TOKEN_BYTES)
    slots = torch.tensor([9, 2, 30, 31, 4, 17, 0], dtype=torch.int32)
    wire.feeder.begin("t", range(5, 12))
    wire.rows("t", slots, 5)
    wire.feeder.state("t", handoff_pb2.State(first_token_id=3), torch.ones(1, 2))
    wait_for(lambda: len(wire.messages) == 5)
    assert wire.kinds() == ["begin", "chunk", "chunk", "chunk", "state"]
    got = []
    for message in wire.messages[1:4]:
        data = torch.empty(message.chunk.num_bytes // 4)
        wire.far_end.recv(data)
        got.append((message.chunk.first_token, message.chunk.num_tokens, data))
    assert [(first, count) for first, count, _ in got] == [(5, 2), (7, 2), (9, 3)]
    for (_, count, data), start in zip(got, (0, 2, 4), strict=True):
        assert torch.equal(data, wire.kv.gather(range(2), slots[start : start + count]))


def test_giving_up_behind_a_busy_link_skips_the_rows_but_tells_the_receiver(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.handoff.outbox, "WINDOW_BYTES", 0)  # no credit: what has bytes stands in line
    for ticket in ("busy", "t"):
        wire.feeder.begin(ticket, range(8))
        wire.rows(ticket, torch.arange(8, dtype=torch.int32))
    wire.feeder.abort("t", "the caller went away")
    monkeypatch.setattr(kv_transfer.handoff.outbox, "WINDOW_BYTES", 1024)
    wire.sender.acknowledge(handoff_pb2.HandoffAck(credit=handoff_pb2.Credit(num_bytes=1)))
    wait_for(lambda: "abort" in wire.kinds())
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "t"] in (["abort"], ["begin", "abort"])
    wire.sender.acknowledge(handoff_pb2.HandoffAck(ticket="t", failed=handoff_pb2.Failed(reason="aborted")))
    wait_for(lambda: wire.ended == [("t", "failed")])


def test_rows_of_a_ticket_that_has_ended_are_not_read(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be somebody else's by then."""
    read: list[str] = []
    gather = RowSource.gather

    def counted(*args: Any) -> torch.Tensor:
        read.append("rows")
        return gather(*args)

    monkeypatch.setattr(RowSource, "gather", counted)
    slots = torch.arange(8, dtype=torch.int32)
    wire.feeder.begin("t", range(8))
    wait_for(lambda: "begin" in wire.kinds())
    wire.sender.acknowledge(handoff_pb2.HandoffAck(ticket="t", failed=handoff_pb2.Failed(reason="no pages")))
    wait_for(lambda: bool(wire.ended))
    wire.rows("t", slots)
    wire.feeder.begin("u", range(8))
    wire.rows("u", slots)
    wait_for(lambda: "chunk" in wire.kinds())
    assert read == ["rows"]
    assert [m.ticket for m in wire.messages if m.HasField("chunk")] == ["u"]


def test_a_ticket_does_not_end_while_its_rows_are_read(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    gather = RowSource.gather

    def slow(*args: Any) -> torch.Tensor:
        reading.set()
        assert go_on.wait(5.0)
        return gather(*args)

    monkeypatch.setattr(RowSource, "gather", slow)
    wire.feeder.begin("t", range(8))
    wire.rows("t", torch.arange(8, dtype=torch.int32))
    assert reading.wait(5.0)
    wire.sender.acknowledge(handoff_pb2.HandoffAck(ticket="t", failed=handoff_pb2.Failed(reason="too late")))
    assert wire.ended == []
    go_on.set()
    wait_for(lambda: wire.ended == [("t", "failed")])
    assert "chunk" not in wire.kinds()


def test_a_link_that_is_lost_while_rows_are_read_tells_afterwards(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> torch.Tensor:
        reading.set()
        assert go_on.wait(5.0)
        raise RuntimeError("and then it broke")

    monkeypatch.setattr(RowSource, "gather", slow)
    wire.feeder.begin("t", range(8))
    wire.rows("t", torch.arange(8, dtype=torch.int32))
    assert reading.wait(5.0)
    wire.sender.link_lost("pulled")
    assert wire.ended == []
    go_on.set()
    wait_for(lambda: wire.ended == [("t", "pulled")])


def test_buffers_come_back_whatever_becomes_of_the_rows(wire: Wire) -> None:
    slots = torch.arange(8, dtype=torch.int32)
    for number in range(3 * NUM_BUFFERS):
        ticket = f"t{number}"
        wire.feeder.begin(ticket, range(8))
        wire.rows(ticket, slots if number % 3 else slots + 1000)
        wire.rows("nobody's", slots)
        wire.feeder.state(ticket, handoff_pb2.State(), None)
    wait_for(lambda: wire.kinds().count("state") == 2 * NUM_BUFFERS)
    wait_for(lambda: not wire.sender._outbox)
    staging = wire.feeder._staging
    assert len(staging._free) == NUM_BUFFERS


def test_a_dead_link_refuses_to_begin(wire: Wire) -> None:
    wire.sender.link_lost("pulled")
    wire.feeder.begin("t", range(4))
    wait_for(lambda: bool(wire.refused))
    assert wire.refused[0][0] == "t"
    assert "pulled" in wire.refused[0][1]
    wire.sender.close(5.0)
    wire.feeder.close(5.0)
    wire.feeder.begin("u", range(4))
    assert wire.refused[1] == ("u", "the link is closed")


def test_rows_that_cannot_be_read_fail_their_ticket_only(wire: Wire) -> None:
    wire.feeder.begin("bad", range(1))
    wire.rows("bad", torch.tensor([999], dtype=torch.int32))
    wire.feeder.begin("good", range(1))
    wire.rows("good", torch.tensor([1], dtype=torch.int32))
    wait_for(lambda: len([m for m in wire.messages if m.ticket == "good"]) == 2)
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "good"] == ["begin", "chunk"]
    # Begin may still have been queued when the Abort took its place.
    assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "bad"] in (["abort"], ["begin", "abort"])
