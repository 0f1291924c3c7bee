"""The decode side of a link: one thread that takes descriptors in order and receives the bytes each announces.

Queue: produced by the control stream (`feed`), consumed in order by the receiver thread (control.py). Requests about a
ticket (`cancel`, `fail`) go to the same thread, so `HandoffSink.ready` and `failed` are told only when no write of that
ticket can happen any more. in_flight.py keeps the tickets and tells their ends, intake.py receives their bytes.

When the link dies, the tickets in flight fail only after the blocked receive has returned; until then they are listed
in ``draining`` and their pages must not be used again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from kv_transfer.handoff.control import ControlQueue, Work
from kv_transfer.handoff.cut import announcement_problem
from kv_transfer.handoff.in_flight import InFlight
from kv_transfer.handoff.intake import Intake
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.staging import Staging
from kv_transfer.lanes.arrivals import Arrivals
from kv_transfer.transports.base import MessageRefused, Transport, TransportError
from kv_transfer.transports.side_stream import own_stream
from paceline.v1.handoff_pb2 import HandoffAck, HandoffMessage, Ready

log = logging.getLogger(__name__)


class HandoffReceiver:
    """One link's receiver.

    Before a ticket is in flight here, the decode node gives it up itself (`Handoff.fail_reserved`); while it is, the
    node asks this link (`cancel`, `fail`).

    ``ack``: puts an answer on the control stream; thread-safe, never blocks.
    ``on_link_lost(reason)``: once, when the link dies and its tickets have failed (not on ``close``).
    ``max_chunk_bytes``: a message that announces more ends the link; bounds the staging buffer.
    ``device``: where bytes are received (a CUDA device for NCCL).
    ``pool_device``: where the sink puts them. On a GPU the receiver's thread has a stream of its own there.
    ``on_refused``: from the thread, for each message that it took and that no sender of ours writes: of no kind, with
    rows that do not fit their hand-off, or bytes that the peer did not seal. `feed` raises for others.
    ``arrivals``: what ranks get from ranks beside what the transport brings, in step with it.
    ``checksums``: bytes whose sum is missing or wrong fail their ticket before any of them is used; host memory only.
    """

    def __init__(
        self,
        transport: Transport,
        sink: HandoffSink,
        ack: Callable[[HandoffAck], None],
        *,
        link_id: str = "",
        on_link_lost: Callable[[str], None] = lambda reason: None,
        max_chunk_bytes: int = 256 * 1024 * 1024,
        device: torch.device | str = "cpu",
        pool_device: torch.device | str = "cpu",
        checksums: bool = False,
        arrivals: Arrivals | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:  # three are needed; the others have defaults, and a name for each
        self._transport = transport
        self._max_chunk_bytes = max_chunk_bytes
        self._on_link_lost, self._on_refused = on_link_lost, on_refused
        self._control = ControlQueue()
        self._in_flight = InFlight(sink, ack, link_id, None if arrivals is None else arrivals.lanes.options.lead)
        self._pool_device = torch.device(pool_device)
        pinned = self._pool_device.type == "cuda" and torch.device(device).type == "cpu"
        self._intake = Intake(
            Staging(transport, device, pinned=pinned),
            sink,
            self._control,
            self._in_flight,
            checksums=checksums,
            arrivals=arrivals,
            on_refused=on_refused,
        )
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="handoff-receiver", daemon=True)
        self._thread.start()

    # -- the owner's events ------------------------------------------------------------------------------------

    def feed(self, message: HandoffMessage) -> None:
        """Queue the next control message; never blocks. TransportError when the link is dead, MessageRefused when it
        dies of a message that no sender of ours writes. Overloaded when 4096 messages wait: the sender ran ahead of the
        bytes it announced, so end the link."""
        problem = announcement_problem(message, self._max_chunk_bytes)
        if problem is not None:
            self.link_lost(problem)
            raise MessageRefused(problem)
        self._control.put(message)

    def cancel(self, ticket: str) -> bool:
        """The client left: tell the sender; `HandoffSink.failed` follows when its Abort or State has arrived, or when
        the link dies, or after `fail`. False when the ticket is not in flight on this link: then nothing follows."""
        return self._in_flight.cancel(ticket)

    def fail(self, ticket: str, reason: str) -> bool:
        """Give a ticket up now (a deadline passed). `HandoffSink.failed` follows, at the latest one message timeout
        later. False when the ticket is not in flight on this link: then nothing follows."""
        if self._in_flight.get(ticket) is None:
            return False
        self._control.fail(ticket, reason)
        return True

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def draining(self) -> tuple[str, ...]:
        """Tickets of a dead link whose pages may still be written: a receive is blocked. Empty on a live link."""
        return () if self.alive else self._in_flight.tickets

    @property
    def alive(self) -> bool:
        """The link can still be used."""
        return self._control.closed is None

    # -- end of the link ---------------------------------------------------------------------------------------

    def link_lost(self, reason: str) -> None:
        """The peer is gone (sentinel, control stream, lease). Tickets in flight fail once no receive is blocked."""
        if self._control.close(reason):
            self._transport.abort()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop, and close the transport; tickets in flight fail. True when the thread ended within ``timeout_s``; False
        when a receive is still blocked (its tickets stay in ``draining`` until it returns)."""
        self._closing = True
        self.link_lost("link closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._transport.close()
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with own_stream(self._pool_device):
            while (work := self._control.next()) is not None:
                self._do(work)
            self._end()
            self._intake.settle()  # what is posted is written into memory that goes with this link

    def _do(self, work: Work) -> None:
        if isinstance(work, tuple):
            self._in_flight.fail(*work)
            return
        try:
            self._handle(work)
        except Exception as error:
            if isinstance(error, MessageRefused):
                self._on_refused()
            if not isinstance(error, TransportError):
                log.exception("hand-off receiver failed")
            self.link_lost(str(error) or repr(error))

    def _end(self) -> None:
        """No receive is blocked any more: fail what was in flight."""
        reason = self._control.closed or "link closed"
        for ticket in self._in_flight.tickets:
            self._in_flight.fail(ticket, reason)
        if self._closing:
            return
        try:
            self._on_link_lost(reason)
        except Exception:
            log.exception("telling a lost link failed")

    def _handle(self, message: HandoffMessage) -> None:
        """One control message and the bytes that it announces. TransportError when the link broke."""
        match message.WhichOneof("body"):
            case "hello":
                self._in_flight.answer(HandoffAck(hello=Ready()))
            case "begin":
                self._in_flight.begin(message)
            case "chunk":
                self._intake.chunk(message)
            case "state":
                self._intake.state(message)
            case "abort":
                self._in_flight.fail_or_disown(message.ticket, message.abort.reason or "aborted by the sender")
            case other:
                raise MessageRefused(f"control message without a known body ({other})")
        self._intake.give_credit()
