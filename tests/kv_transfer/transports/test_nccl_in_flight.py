"""Several NCCL messages in flight: what is posted when, on which stream, and what ends the wait. Calls are recorded."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import kv_transfer.transports.nccl as nccl
from kv_transfer.handoff.outbox import Payload
from kv_transfer.handoff.pump import WirePump
from kv_transfer.transports.base import MESSAGE_BYTES, TransportError
from kv_transfer.transports.nccl import NcclTransport


class Bytes:
    """A CUDA tensor as far as the transport looks at it."""

    is_cuda = True

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def numel(self) -> int:
        return self._num_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        return Bytes(piece.stop - piece.start)


class Cuda:
    """Stands in for torch.cuda and for the process group. Events happen when ``finished`` says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current, self.finished, self.posted = "link", 0, 0

    def named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.calls.append(f"{name} waits for {event.name}"),
        )

    def event(self) -> Any:
        number = self.posted
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.finished >= number)

    @contextmanager
    def inside(self, stream: Any) -> Any:
        before, self.current = self.current, getattr(stream, "name", self.current)
        yield
        self.current = before

    def recv(self, tensors: list[Bytes], peer: int, tag: int) -> Any:
        self.posted += 1
        self.calls.append(f"{tensors[0].numel()} bytes on {self.current}")
        return SimpleNamespace(wait=lambda: None)

    send = recv

    def abort(self) -> None:
        self.calls.append("aborted")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    stand_in = SimpleNamespace(
        Stream=lambda device: cuda.named("wire"),
        Event=cuda.event,
        current_stream=lambda device: cuda.named(cuda.current),
        stream=cuda.inside,
        device=cuda.inside,
    )
    monkeypatch.setattr(nccl, "torch", SimpleNamespace(cuda=stand_in))
    monkeypatch.setattr(nccl, "byte_view", lambda tensor: tensor)
    monkeypatch.setattr(torch, "cuda", stand_in)
    return cuda


def transport_of(cuda: Cuda, timeout_s: float = 5.0) -> NcclTransport:
    return NcclTransport(cuda, "t", 1, torch.device("cuda:0"), timeout_s)


def test_messages_are_posted_before_the_one_in_front_has_come(cuda: Cuda) -> None:
    """Mutant: ``start_recv`` of the base class, which receives when it is awaited."""
    transport = transport_of(cuda)
    first, second = (transport.start_recv(cast("Any", Bytes(size))) for size in (7, MESSAGE_BYTES + 1))
    posted = ["wire waits for link", "7 bytes on wire", "wire waits for link", f"{MESSAGE_BYTES} bytes on wire"]
    assert cuda.calls == [*posted, "wire waits for link", "1 bytes on wire"]
    cuda.finished = 1
    first()
    cuda.finished = 3
    second()
    assert transport._dead is None


@pytest.mark.parametrize("cut", [False, True])
def test_a_message_that_never_comes_ends_the_pipe(cuda: Cuda, cut: bool) -> None:
    """By its timeout; or by an abort, behind which every event has happened. Mutants: no timeout; what an aborted
    receive left is used."""
    transport = transport_of(cuda, 60.0 if cut else 0.05)
    pending = transport.start_recv(cast("Any", Bytes(7)))
    if cut:
        transport.abort()
        cuda.finished = 1
    with pytest.raises(TransportError, match="aborted" if cut else "message timeout of 0.05 s"):
        pending()
    assert cuda.calls[-1] == "aborted"
    with pytest.raises(TransportError):
        transport.start_recv(cast("Any", Bytes(1)))


def test_rows_that_are_being_computed_are_posted_and_awaited_in_order(cuda: Cuda) -> None:
    """The wire waits for them on the device; the sender's thread counts a message's time from when they are there.
    Mutants: the host waits before it posts; nobody waits for the rows."""
    transport = transport_of(cuda)
    pump = cast("WirePump", SimpleNamespace(_idle=None, _transport=transport))
    pump._start_from_gpu = WirePump._start_from_gpu.__get__(pump)  # type: ignore[method-assign]
    produced = SimpleNamespace(name="rows", synchronize=lambda: cuda.calls.append("the host waits for rows"))
    data = cast("Any", Bytes(7))
    data.device = "cuda:0"
    waiting = WirePump._start_data(pump, Payload(data, cast("Any", produced), lambda: None))
    assert cuda.calls == ["wire waits for rows", "wire waits for wire", "7 bytes on wire"]
    cuda.finished = 1
    waiting()
    assert cuda.calls[-1] == "the host waits for rows"
