"""How the messages of a sending end are started: with no lock held, and never before their rows are computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.transports.base import Pending, Transport
from paceline.v1.handoff_pb2 import Failed, HandoffAck, HandoffMessage
from tests.support.handoff_link import wait_for

ROWS = RowBlock(TARGET_KV, range(1), range(8))


class Recorded(Transport):
    """Sends nothing; says what is asked of it. ``gate`` holds up whoever starts a message."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def start_send(self, tensor: torch.Tensor) -> Pending:
        self.entered.set()
        assert self.gate.wait(10)
        self.said.append("started")
        return lambda: self.said.append("sent")

    def _send_message(self, data: torch.Tensor) -> None:
        self.said.append("sent")

    def _recv_message(self, data: torch.Tensor) -> None:
        raise AssertionError("a sender receives nothing")

    def close(self) -> None: ...

    def abort(self) -> None:
        self.said.append("aborted")


class Sending:
    """A sender over `Recorded`, and what its owner was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: list[tuple[str, HandoffAck | str]] = []
        self.posted: list[HandoffMessage] = []
        self.transport = Recorded(self.said)
        self.sender = HandoffSender(
            self.transport,
            self.posted.append,
            on_ended=lambda ticket, end: self.ended.append((ticket, end)),
            on_link_lost=lambda reason: None,
        )
        self.sender.begin("t", ROWS.tokens)


@contextmanager
def sending() -> Iterator[Sending]:
    made = Sending()
    try:
        yield made
    finally:
        made.transport.gate.set()
        assert made.sender.close(5)


@contextmanager
def in_the_midst_of_a_write(made: Sending) -> Iterator[list[str]]:
    """Another thread writes a message to the wire; ``done`` is what it says of its buffer."""
    done: list[str] = []
    made.transport.gate.clear()
    rows = torch.zeros(64, dtype=torch.uint8)
    writer = threading.Thread(target=made.sender.chunk, args=("t", ROWS, rows, lambda: done.append("done")))
    writer.start()
    assert made.transport.entered.wait(5)
    try:
        yield done
    finally:
        made.transport.gate.set()
        writer.join(5)
        assert not writer.is_alive()


def on_a_thread(*calls: Any) -> bool:
    """Every call returned although somebody else writes."""
    thread = threading.Thread(target=lambda: [call() for call in calls], daemon=True)
    thread.start()
    thread.join(2)
    return not thread.is_alive()


def test_an_acknowledgement_does_not_wait_for_a_message_that_is_written() -> None:
    with sending() as made:
        failed = HandoffAck(ticket="t", failed=Failed(reason="no pages"))
        with in_the_midst_of_a_write(made) as done:
            begin = lambda: made.sender.begin("u", range(3))  # noqa: E731
            assert on_a_thread(lambda: made.sender.acknowledge(failed), begin)
            assert [message.WhichOneof("body") for message in made.posted] == ["begin", "chunk", "begin"]
            assert made.ended == []  # its bytes are announced: they must leave first
        wait_for(lambda: made.ended == [("t", failed)], "the end of the ticket")
        assert (done, made.said) == (["done"], ["started", "sent"])


def test_a_link_that_is_lost_while_a_message_is_written_ends_the_ticket_behind_it() -> None:
    with sending() as made:
        with in_the_midst_of_a_write(made) as done:
            assert on_a_thread(lambda: made.sender.link_lost("pulled"))
            assert (made.ended, done) == ([], [])
        wait_for(lambda: made.ended == [("t", "pulled")], "the end of the ticket")
        assert (done, made.said) == (["done"], ["aborted", "started", "sent"])


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for a GPU's streams and events; what was asked of them."""
    asked: list[str] = []

    class Event:
        def record(self) -> None:
            asked.append("recorded")

        def synchronize(self) -> None:
            asked.append("computed")

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = SimpleNamespace(wait_event=lambda event: asked.append("the wire waits"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return asked


def test_rows_of_a_gpu_leave_once_they_are_computed(device: list[str]) -> None:
    """The event is recorded behind the work that the giver's stream holds; the wire waits for it on the device, and the
    thread before it counts a message's time."""
    with sending() as made:
        made.transport.said = device
        made.sender.chunk("t", ROWS, torch.zeros(64, dtype=torch.uint8).as_subclass(OnDevice))
        wait_for(lambda: len(device) == 5, "the message")
        assert device == ["recorded", "the wire waits", "started", "computed", "sent"]
