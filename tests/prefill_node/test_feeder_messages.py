"""Chunks of several messages: announced once, gathered message by message, sent whole whatever becomes of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import kv_transfer.handoff.cut
from kv_transfer.handoff.block import TARGET_KV
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import NUM_BUFFERS
from paceline.v1 import handoff_pb2
from tests.fakes.wait import wait_for
from tests.support.feeder_wire import TOKEN_BYTES, Wire, open_wire

SLOTS = torch.tensor([9, 2, 30, 31, 4, 17, 0], dtype=torch.int32)


@pytest.fixture(autouse=True)
def messages_of_three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.handoff.cut, "MESSAGE_BYTES", 3 * TOKEN_BYTES)


def received(wire: Wire, num_tokens: int) -> torch.Tensor:
    data = torch.empty(num_tokens * TOKEN_BYTES // 4)
    wire.far_end.recv(data)
    return data


def buffers_back(wire: Wire) -> bool:
    return len(wire.feeder._staging._free) == NUM_BUFFERS


def test_one_descriptor_and_then_its_messages() -> None:
    with open_wire() as wire:
        wire.feeder.begin("t", range(5, 12))
        wire.rows("t", SLOTS, 5)
        wire.feeder.state("t", handoff_pb2.State(first_token_id=3), torch.ones(1, 2))
        wait_for(lambda: len(wire.messages) == 3)
        assert wire.kinds() == ["begin", "chunk", "state"]
        chunk = wire.messages[1].chunk
        assert (chunk.first_token, chunk.num_tokens, chunk.num_bytes) == (5, 7, 7 * TOKEN_BYTES)
        for start, stop in ((0, 3), (3, 6), (6, 7)):
            assert torch.equal(received(wire, stop - start), wire.kv.gather(range(2), SLOTS[start:stop]))
        assert received(wire, 0).numel() == 0
        wait_for(lambda: buffers_back(wire))
        wait_for(lambda: not wire.sender._outbox)  # State is off too, and counted
        counts = wire.sender.bytes_sent("t")
        assert counts[TARGET_KV] == 7 * TOKEN_BYTES
        assert counts[handoff_pb2.BYTE_CLASS_META] == sum(message.ByteSize() for message in wire.messages)


def test_a_ticket_that_ends_in_the_midst_is_sent_unread_and_ends_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be somebody else's from then on, and the receiver counts on the bytes."""
    first_read, go_on, reads = threading.Event(), threading.Event(), []
    gather = RowSource.gather

    def slow(*args: Any) -> torch.Tensor:
        reads.append("rows")
        rows = gather(*args)
        first_read.set()
        assert go_on.wait(5.0)
        return rows

    with open_wire() as wire:
        monkeypatch.setattr(RowSource, "gather", slow)
        wire.feeder.begin("t", range(7))
        wire.rows("t", SLOTS)
        assert first_read.wait(5.0)
        wire.sender.acknowledge(handoff_pb2.HandoffAck(ticket="t", failed=handoff_pb2.Failed(reason="no pages")))
        assert wire.ended == []
        go_on.set()
        for num_tokens in (3, 3, 1):
            received(wire, num_tokens)
        wait_for(lambda: wire.ended == [("t", "failed")])
        assert reads == ["rows"]
        wait_for(lambda: buffers_back(wire))


def test_rows_that_cannot_be_read_in_the_midst_fail_their_ticket_only() -> None:
    bad = SLOTS.clone()
    bad[3] = 999
    with open_wire() as wire:
        wire.feeder.begin("bad", range(7))
        wire.rows("bad", bad)
        wire.feeder.begin("good", range(7))
        wire.rows("good", SLOTS)
        for num_tokens in (3, 3, 1):
            received(wire, num_tokens)
        for start, stop in ((0, 3), (3, 6), (6, 7)):
            assert torch.equal(received(wire, stop - start), wire.kv.gather(range(2), SLOTS[start:stop]))
        assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "bad"] == ["begin", "chunk", "abort"]
        assert [m.WhichOneof("body") for m in wire.messages if m.ticket == "good"] == ["begin", "chunk"]
        assert wire.sender.alive


def test_a_chunk_that_cannot_be_finished_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer comes free: the receiver would wait for ever."""
    with open_wire(staging_timeout_s=0.05) as wire:
        taken = [wire.feeder._staging.take(1) for _ in range(NUM_BUFFERS - 1)]
        monkeypatch.setattr(wire.feeder._staging, "give_back", lambda buffer: None)
        wire.feeder.begin("t", range(7))
        wire.rows("t", SLOTS)
        wait_for(lambda: not wire.sender.alive)
        assert len(taken) == NUM_BUFFERS - 1
        lost = "an announced chunk could not be sent: no staging buffer came free within 0.05 s"
        wait_for(lambda: wire.ended == [("t", lost)])


def test_a_lost_link_in_the_midst_gives_every_buffer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    second, go_on, reads = threading.Event(), threading.Event(), []
    gather = RowSource.gather

    def slow(*args: Any) -> torch.Tensor:
        reads.append("rows")
        if len(reads) == 2:
            second.set()
            assert go_on.wait(5.0)
        return gather(*args)

    with open_wire() as wire:
        monkeypatch.setattr(RowSource, "gather", slow)
        wire.feeder.begin("t", range(7))
        wire.rows("t", SLOTS)
        assert second.wait(5.0)
        wire.sender.link_lost("pulled")
        go_on.set()
        wait_for(lambda: wire.ended == [("t", "pulled")])
        wait_for(lambda: buffers_back(wire))
        assert reads == ["rows", "rows"]  # the third message is not even gathered


def test_sums_are_of_one_message_each() -> None:
    with open_wire(checksums=True) as wire:
        wire.feeder.begin("t", range(7))
        wire.rows("t", SLOTS)
        wait_for(lambda: len(wire.messages) == 4)
        assert [m.chunk.num_tokens for m in wire.messages[1:]] == [2, 2, 3]
        assert all(m.chunk.HasField("checksum") for m in wire.messages[1:])
