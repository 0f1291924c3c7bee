"""A hand-off link under pressure and at its end: queues, lost peers, stuck calls, close."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.base import Transport, TransportError
from paceline.errors import DeadlineExceeded
from paceline.v1.handoff_pb2 import Abort, HandoffMessage
from tests.support.handoff_link import (
    TARGET,
    TOKENS,
    Link,
    Prompt,
    open_link,
    wait_for,
)

torch.set_num_threads(1)


def test_queue_is_bounded_in_bytes_and_time() -> None:
    row = len(Prompt(0).flat(TARGET, range(16, 17))) * 2
    with open_link(max_queued_bytes=4 * row, enqueue_timeout_s=0.1) as link:
        link.sink.write_gate.clear()
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        # One row in the write that is held, two in the pipe, one on the wire, three queued.
        for token in range(16, 23):
            wait_for(lambda: link.sender._outbox.has_room(row), "room")
            link.put("t", Prompt(0), TARGET, range(token, token + 1))
            time.sleep(0.02)
        with pytest.raises(DeadlineExceeded, match="no room"):
            link.put("t", Prompt(0), TARGET, range(23, 24))
        link.sender._enqueue_timeout_s = 5.0
        timer = threading.Timer(0.02, link.sink.write_gate.set)
        timer.start()
        link.put("t", Prompt(0), TARGET, range(23, 24))  # waits for room, and gets it
        timer.join()
        link.sender.abort("t", "enough")
        wait_for(lambda: link.terminal, "the end")


def test_one_chunk_larger_than_the_queue_still_passes() -> None:
    with open_link(max_queued_bytes=16) as link:
        link.sink.reserve("t")
        prompt = Prompt(0)
        link.hand_over("t", prompt)
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        link.check_rows("t", prompt)


def test_a_lost_link_fails_every_ticket_once() -> None:
    with open_link() as link:
        tickets = ("a", "b")
        for ticket in tickets:
            link.sink.reserve(ticket)
            link.sender.begin(ticket, TOKENS)
        wait_for(lambda: all(h.status is HandoffState.SENDING for h in link.sink.handoffs.values()), "Begins")
        link.send_end.abort()  # as a peer's death looks to a transport
        link.put("a", Prompt(0), TARGET, range(16, 66))
        for ticket in tickets:
            assert "abort" in link.failure(ticket)
        assert sorted(t for t, _ in link.failed + link.terminal) == ["a", "b"]  # by own error or by a last Failed
        wait_for(lambda: link.lost and link.receiver_lost, "on_link_lost at both ends")
        assert (len(link.lost), len(link.receiver_lost)) == (1, 1)
        link.sender.link_lost("again")
        link.receiver.link_lost("again")
        assert (len(link.lost), len(link.receiver_lost)) == (1, 1)
        assert not link.sender.alive
        with pytest.raises(TransportError, match="dead"):
            link.sender.begin("c", TOKENS)
        with pytest.raises(TransportError, match="dead"):
            link.receiver.feed(HandoffMessage(ticket="a", abort=Abort()))


class StuckTransport(Transport):
    """A pipe whose calls block until ``release``, whatever is aborted: gloo in the middle of a message."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def _block(self) -> None:
        self.entered.set()
        assert self.release.wait(10)
        raise TransportError("message timeout")

    def _send_message(self, data: Tensor) -> None:
        self._block()

    def _recv_message(self, data: Tensor) -> None:
        self._block()

    def close(self) -> None: ...

    def abort(self) -> None: ...


def test_buffers_are_quarantined_while_a_receive_or_a_send_is_stuck() -> None:
    stuck = (StuckTransport(), StuckTransport())
    with open_link(transports=stuck) as link:
        for ticket in ("on wire", "waiting"):
            link.sink.reserve(ticket)
            link.sender.begin(ticket, TOKENS)
        link.put("on wire", Prompt(0), TARGET, range(16, 66))
        assert stuck[0].entered.wait(5)
        assert stuck[1].entered.wait(5)
        link.receiver.link_lost("peer died")
        link.sender.link_lost("peer died")
        # Tickets whose bytes are not on the wire may go at once; the other only when the blocked call returned.
        assert link.failed == [("waiting", "peer died")]
        assert set(link.sender.open_tickets) == {"on wire"}
        assert set(link.receiver.draining) == {"on wire", "waiting"}
        assert link.sink.failures == []
        assert not link.receiver.close(0.01)
        assert not link.sender.close(0.01)
        for transport in stuck:
            transport.release.set()
        assert link.failure("on wire") == "peer died"
        assert link.failure("waiting") == "peer died"


def test_close_fails_what_is_open_and_is_not_a_loss() -> None:
    link = Link()
    handoff = link.sink.reserve("t")
    link.sender.begin("t", TOKENS)
    wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
    assert link.sender.close(5)
    assert link.receiver.close(5)
    assert link.failed == [("t", "link closed")]
    assert link.sink.failures == [("t", "link closed")]
    assert link.lost == link.receiver_lost == []
    assert link.sender.close(5)
    assert link.receiver.close(5)
