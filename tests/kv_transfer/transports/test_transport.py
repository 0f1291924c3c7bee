"""The transport seam: how bytes are cut, and the loopback pair."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from kv_transfer.transports.base import MESSAGE_BYTES, TransportError, byte_view, message_slices
from kv_transfer.transports.loopback import loopback_pair

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "num_bytes", [0, 1, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES + 7]
)
def test_message_slices_cover_every_byte_once(num_bytes: int) -> None:
    slices = message_slices(num_bytes)
    covered = [byte for piece in slices for byte in (piece.start, piece.stop)]
    assert covered == sorted(covered)
    assert sum(piece.stop - piece.start for piece in slices) == num_bytes
    assert all(0 < piece.stop - piece.start <= MESSAGE_BYTES for piece in slices)
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))


def test_byte_view_refuses_strided_tensors() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        byte_view(torch.zeros(4, 4)[:, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_bytes_arrive_unchanged(dtype: torch.dtype, numel: int) -> None:
    sender, receiver = loopback_pair()
    sent = torch.randint(0, 2, (numel,)).to(dtype)
    sender.send(sent)
    got = torch.zeros_like(sent)
    receiver.recv(got)
    assert torch.equal(byte_view(sent), byte_view(got))


def test_large_tensor_crosses_in_several_messages() -> None:
    sender, receiver = loopback_pair(max_messages=1)
    sent = torch.randint(0, 256, (2 * MESSAGE_BYTES + 5,), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    thread = threading.Thread(target=sender.send, args=(sent,))
    thread.start()
    receiver.recv(got)
    thread.join(5)
    assert torch.equal(sent, got)


def test_full_pipe_and_empty_pipe_time_out() -> None:
    sender, receiver = loopback_pair(max_messages=1, timeout_s=0.05)
    sender.send(torch.zeros(1))
    with pytest.raises(TransportError, match="timeout"):
        sender.send(torch.zeros(1))
    with pytest.raises(TransportError):
        receiver.recv(torch.zeros(1))
    _, receiver = loopback_pair(timeout_s=0.05)
    with pytest.raises(TransportError, match="timeout"):
        receiver.recv(torch.zeros(1))


def test_after_close_the_rest_can_be_received_then_it_is_an_error() -> None:
    sender, receiver = loopback_pair()
    sender.send(torch.arange(3))
    sender.close()
    got = torch.zeros(3, dtype=torch.int64)
    receiver.recv(got)
    assert got.tolist() == [0, 1, 2]
    with pytest.raises(TransportError, match="closed"):
        receiver.recv(got)
    with pytest.raises(TransportError, match="closed"):
        sender.send(got)


def test_abort_wakes_a_blocked_receive_and_drops_what_waits() -> None:
    sender, receiver = loopback_pair(timeout_s=60)
    timer = threading.Timer(0.05, sender.abort)
    start = time.monotonic()
    timer.start()
    with pytest.raises(TransportError, match="aborted"):
        receiver.recv(torch.zeros(1))
    assert time.monotonic() - start < 30
    sender, receiver = loopback_pair()
    sender.send(torch.zeros(1))
    receiver.abort()
    with pytest.raises(TransportError, match="aborted"):
        receiver.recv(torch.zeros(1))


def test_a_wrong_size_is_an_error_and_ends_the_pipe() -> None:
    sender, receiver = loopback_pair()
    sender.send(torch.zeros(2))
    with pytest.raises(TransportError, match="8 bytes arrived where 4"):
        receiver.recv(torch.zeros(1))
    with pytest.raises(TransportError):
        sender.send(torch.zeros(1))
