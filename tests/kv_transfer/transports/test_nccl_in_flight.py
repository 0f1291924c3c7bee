"""Several NCCL messages in flight: what is posted when, on which stream, and what ends the wait. Calls are recorded."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import kv_transfer.transports.nccl as nccl
from kv_transfer.handoff.block import TARGET_KV
from kv_transfer.handoff.outbox import Outbox, Outgoing, Payload
from kv_transfer.handoff.pump import WirePump
from kv_transfer.handoff.tickets import TicketBook
from kv_transfer.transports.base import MESSAGE_BYTES, TransportError
from kv_transfer.transports.nccl import NcclTransport
from paceline.v1.handoff_pb2 import Chunk
from tests.support.handoff_link import wait_for


class Bytes:
    """A CUDA tensor as far as the transport looks at it."""

    is_cuda = True

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def numel(self) -> int:
        return self._num_bytes

    @property
    def nbytes(self) -> int:
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
    transport.multiple = 2  # mutant: cut as ever
    transport.start_recv(cast("Any", Bytes(MESSAGE_BYTES + 1)))
    assert cuda.calls[-1] == f"{MESSAGE_BYTES + 1} bytes on wire"


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


@pytest.mark.parametrize("comes", [True, False])
def test_a_communicator_has_longer_to_start_than_a_message(
    cuda: Cuda, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for ever. Mutant: the message's timeout."""
    monkeypatch.setattr(nccl, "JOIN_TIMEOUT_S", 20.0 if comes else 0.2)
    stand_in = SimpleNamespace(cuda=torch.cuda, zeros=lambda *_, **__: Bytes(1), uint8=torch.uint8)
    monkeypatch.setattr(nccl, "torch", stand_in)
    transport = transport_of(cuda, 0.05)
    if comes:
        threading.Timer(0.3, lambda: setattr(cuda, "finished", 1)).start()
        transport.join()
        assert transport._dead is None
        return
    with pytest.raises(TransportError, match=r"message timeout of 0.2 s"):
        transport.join()


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


class Sending:
    """A pump over the recorded wire with two messages posted, and the end of whose buffers was told."""

    def __init__(self, cuda: Cuda, timeout_s: float = 5.0) -> None:
        self.back: list[int] = []
        self.ended: list[str] = []
        outbox = Outbox(1 << 20)
        book = TicketBook(outbox, lambda ticket, _: self.ended.append(ticket))
        self.pump = WirePump(
            transport_of(cuda, timeout_s), lambda message: None, outbox, book,
            on_broken=lambda reason: None, on_sent=None, credit_timeout_s=5.0,
        )  # fmt: skip
        book.open("t")
        item = Outgoing.of("t", Chunk(num_bytes=14), TARGET_KV, 14)
        with outbox.changed:
            outbox.append(item)
        self.pump.push()
        for i in range(2):
            self.pump.give(item, Payload(cast("Any", Bytes(7)), None, partial(self.back.append, i)))


def test_a_link_that_is_lost_gives_buffers_back_when_the_device_is_done(cuda: Cuda) -> None:
    """An abort ends kernels a moment later. Mutants: buffers go before the abort; a wait on an aborted pipe raises at
    once."""
    sending = Sending(cuda)
    sending.pump.stop("pulled")
    assert not sending.pump.join(0.1)
    assert (cuda.calls[-1], sending.back, sending.ended) == ("aborted", [], [])
    cuda.finished = 1
    wait_for(lambda: sending.back == [0], "the first buffer")
    assert not sending.pump.join(0.05)
    cuda.finished = 2
    assert sending.pump.join(5)
    assert (sending.back, sending.ended) == ([0, 1], ["t"])


def test_memory_that_a_kernel_never_leaves_is_nobodys(cuda: Cuda) -> None:
    """The wait is bounded; buffer and pages stay held. Mutant: they are given back when time is up."""
    kept = len(nccl._kept)
    sending = Sending(cuda, timeout_s=0.05)
    sending.pump.stop("pulled")
    assert sending.pump.join(5)
    assert (sending.back, sending.ended, len(nccl._kept) - kept) == ([], [], 2)


def test_pieces_that_were_posted_before_one_that_failed_are_waited_for(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: the start raises, and its memory is given back while a piece is in flight."""
    transport, recv = transport_of(cuda), cuda.recv

    def second_fails(*args: Any) -> Any:
        if cuda.posted:
            raise RuntimeError("no memory")
        return recv(*args)

    monkeypatch.setattr(cuda, "recv", second_fails)
    pending = transport.start_recv(cast("Any", Bytes(MESSAGE_BYTES + 1)))

    def wait() -> None:
        with pytest.raises(TransportError, match="no memory"):
            pending()

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    cuda.finished = 1
    waiting.join(5)
    assert not waiting.is_alive()
