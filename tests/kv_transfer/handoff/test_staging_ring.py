"""The buffers of both ends of a link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from kv_transfer.handoff import staging
from kv_transfer.handoff.staging import Staging, StagingRing
from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS, TransportError
from kv_transfer.transports.loopback import loopback_pair
from paceline.errors import DeadlineExceeded


def test_buffers_are_made_once_and_bound_what_is_in_flight() -> None:
    ring = StagingRing(num_buffers=2, num_bytes=64, timeout_s=0.05)
    first, second = ring.take(10), ring.take(64)
    assert not ring.has_room
    with pytest.raises(DeadlineExceeded, match=r"no staging buffer came free within 0\.05 s"):
        ring.take(1)
    ring.give_back(first)
    assert ring.has_room
    assert ring.take(20) is first
    ring.give_back(second)
    ring.give_back(first)
    assert ring.take(1) is first  # the one that was used last


def test_a_taker_waits_for_a_buffer() -> None:
    ring = StagingRing(num_buffers=1, num_bytes=64, timeout_s=5.0)
    buffer = ring.take(1)
    timer = threading.Timer(0.05, ring.give_back, (buffer,))
    timer.start()
    assert ring.take(1) is buffer
    timer.join()


def test_a_row_of_more_than_a_buffer_gets_a_larger_one() -> None:
    ring = StagingRing(num_buffers=1, num_bytes=64, timeout_s=0.05)
    large = ring.take(100)
    assert large.numel() == 128
    assert not ring.has_room
    ring.give_back(large)
    assert ring.take(100) is large


def test_bytes_that_are_expected_arrive_beside_those_in_use() -> None:
    send_end, recv_end = loopback_pair()
    buffers = Staging(recv_end, "cpu")
    for value in (1, 2, 3):
        send_end.send(torch.full((8,), value, dtype=torch.uint8))
    first = buffers.receive(8)
    buffers.expect([8, 8])
    second = buffers.receive(8)
    assert first.tolist() == [1] * 8
    assert second.tolist() == [2] * 8
    buffers.expect([8, 24])  # the first of them is on its way already
    buffers.drain([8])  # its ticket failed meanwhile
    assert second.tolist() == [2] * 8
    assert buffers.receive_new(0, 3, torch.float32).shape == (0, 3)  # no message
    send_end.send(torch.full((6,), 4.0, dtype=torch.float32))
    rows = buffers.receive_new(2, 3, torch.float32)
    send_end.send(torch.full((6,), 5.0, dtype=torch.float32))
    buffers.receive(24)
    assert rows.tolist() == [[4.0] * 3] * 2


def test_as_many_messages_are_under_way_as_there_are_buffers() -> None:
    started: list[int] = []
    send_end, recv_end = loopback_pair()
    start = recv_end.start_recv

    def counted(tensor: torch.Tensor) -> Callable[[], None]:
        started.append(tensor.data_ptr())
        return start(tensor)

    with patch.object(recv_end, "start_recv", counted):
        buffers = Staging(recv_end, "cpu")
        send_end.send(torch.zeros(8, dtype=torch.uint8))
        in_use = buffers.receive(8)
        buffers.expect([8] * 10)
        assert len(started) == len(set(started)) == NUM_BUFFERS - 1
        assert in_use.data_ptr() not in started
        send_end.send(torch.ones(8, dtype=torch.uint8))
        assert buffers.receive(8).data_ptr() == started[0]
        buffers.expect([8] * 9)
        assert started[NUM_BUFFERS - 1 :] == [in_use.data_ptr()]


def test_buffers_of_what_is_thrown_away_come_back() -> None:
    send_end, recv_end = loopback_pair()
    buffers = Staging(recv_end, "cpu")
    for _ in range(2 * NUM_BUFFERS):
        for value in (1, 2):
            send_end.send(torch.full((8,), value, dtype=torch.uint8))
        buffers.expect([8, 8])
        buffers.drain([8, 8])
    send_end.send(torch.full((8,), 3, dtype=torch.uint8))
    assert buffers.receive(8).tolist() == [3] * 8


def test_only_what_was_expected_may_be_taken() -> None:
    _, recv_end = loopback_pair()
    buffers = Staging(recv_end, "cpu")
    buffers.expect([])
    buffers.expect([MESSAGE_BYTES + 1, 7])  # larger than a buffer: nothing begins before it is asked for
    buffers.expect([8])
    with pytest.raises(TransportError, match="9 bytes are taken where 8 were expected"):
        buffers.receive(9)


def test_credit_counts_every_byte_once_and_waits_until_it_is_worth_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CREDIT_BYTES", 20)
    send_end, recv_end = loopback_pair()
    buffers = Staging(recv_end, "cpu")
    for size in (8, 8, 8, 4):
        send_end.send(torch.zeros(size, dtype=torch.uint8))
    buffers.receive(8)
    buffers.expect([8])
    assert buffers.credit() == 0
    buffers.drain([8])
    assert buffers.credit() == 0
    buffers.receive_new(2, 2, torch.bfloat16)
    assert buffers.credit() == 24
    buffers.drain([4])
    assert buffers.credit() == 0
