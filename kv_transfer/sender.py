"""The prefill side of a link: one thread that posts a descriptor, then sends the bytes it announces.

Queue: produced by the owner (`begin`, `chunk`, `state`, `abort`) and by acknowledgements (an Abort in answer to
Cancelled); consumed in order by the sender thread. Bounded in bytes and in messages.

Life of a ticket here, one event per edge:

    (none) --begin--> OPEN --state--> ENDED --Ready--> (terminal)
                       |               |
                       +--abort / Cancelled--> ABORTING     (what is queued is dropped, an Abort takes its place)
      OPEN, ENDED, ABORTING --Failed ack--> (terminal)
      OPEN, ENDED, ABORTING --link lost, close--> (failed)

Terminal and failed are told once, by `on_terminal` or `on_failed`, and only when no bytes of the ticket are on the
wire any more: the source rows may then be overwritten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from kv_transfer.handoff import HIDDEN, META, ByteClass
from kv_transfer.outbox import Outbox, Outgoing
from kv_transfer.transport import Transport, TransportError
from paceline.errors import DeadlineExceeded, HandoffFailed
from paceline.v1.handoff_pb2 import Abort, Begin, Chunk, HandoffAck, HandoffMessage, State

log = logging.getLogger(__name__)

MAX_REMEMBERED_TICKETS = 1024


class _Phase(Enum):
    OPEN = auto()  # Begin is queued or sent
    ENDED = auto()  # State is queued or sent
    ABORTING = auto()  # Abort is queued or sent; waits for the receiver's Failed


@dataclass
class _Ticket:
    phase: _Phase = _Phase.OPEN
    bytes_sent: dict[ByteClass, int] = field(default_factory=dict)
    final: HandoffAck | str | None = None  # the ack that ended it, or the reason of its failure; told when off the wire


class HandoffSender:
    """One link's sender.

    ``post``: puts a message on the control stream; thread-safe, never blocks, keeps the order.
    ``on_terminal(ticket, ack)``: Ready or Failed arrived, the source pages may go.
    ``on_failed(ticket, reason)``: the link died or was closed first; the source pages may go.
    ``on_link_lost(reason)``: once, when the link dies (not on ``close``).
    ``on_sent(message, began)``: a message and its bytes are off; posting began at ``began``, monotonic.
    Callbacks run on the sender thread or on the thread that called ``acknowledge`` or ``link_lost``, with no lock held.
    """

    def __init__(
        self,
        transport: Transport,
        post: Callable[[HandoffMessage], None],
        *,
        on_terminal: Callable[[str, HandoffAck], None],
        on_failed: Callable[[str, str], None],
        on_link_lost: Callable[[str], None],
        on_sent: Callable[[HandoffMessage, float], None] | None = None,
        max_queued_bytes: int = 64 * 1024 * 1024,
        enqueue_timeout_s: float = 10.0,
    ) -> None:
        self._transport = transport
        self._post = post
        self._on_terminal = on_terminal
        self._on_failed = on_failed
        self._on_link_lost = on_link_lost
        self._on_sent = on_sent
        self._enqueue_timeout_s = enqueue_timeout_s
        self._cond = threading.Condition()
        self._outbox = Outbox(max_queued_bytes)
        self._tickets: dict[str, _Ticket] = {}
        self._ended: OrderedDict[str, dict[ByteClass, int]] = OrderedDict()  # byte counts of the latest tickets
        self._dead: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="handoff-sender", daemon=True)
        self._thread.start()

    # -- the owner's events ------------------------------------------------------------------------------------

    def begin(self, ticket: str, first_token: int, num_tokens: int, reshard: str = "") -> None:
        """Open a hand-off of ``num_tokens`` rows from ``first_token`` on, cut as the plan named ``reshard`` says.
        TransportError when the link is dead, HandoffFailed when the ticket is open already."""
        with self._cond:
            self._check_alive()
            if ticket in self._tickets:
                raise HandoffFailed(f"hand-off {ticket} was begun already")
            self._tickets[ticket] = _Ticket()
        try:
            self._enqueue(ticket, Begin(num_tokens=num_tokens, first_token=first_token, reshard=reshard))
        except DeadlineExceeded:
            with self._cond:
                self._tickets.pop(ticket, None)
            raise

    def chunk(
        self,
        ticket: str,
        byte_class: ByteClass,
        first_layer: int,
        num_layers: int,
        first_token: int,
        num_tokens: int,
        data: Tensor,
    ) -> None:
        """Queue rows in canonical order; ``data``: flat, contiguous, not written to until it was sent.

        Blocks while ``max_queued_bytes`` wait (DeadlineExceeded after ``enqueue_timeout_s``). Dropped without an error
        when the receiver cancelled; HandoffFailed when the ticket is not open (any more), TransportError when the
        link is dead.
        """
        if data.dim() != 1 or not data.is_contiguous():
            raise ValueError("chunk data must be flat and contiguous")
        body = Chunk(
            byte_class=byte_class,
            first_layer=first_layer,
            num_layers=num_layers,
            first_token=first_token,
            num_tokens=num_tokens,
            num_bytes=data.nbytes,
        )
        self._enqueue(ticket, body, byte_class, data)

    def state(self, ticket: str, state: State, hidden: Tensor | None = None) -> None:
        """Queue the seed of decoding; ends the hand-off. ``hidden``: [num_hidden_rows, hidden_size], or None.

        Sets num_hidden_rows and num_bytes of a copy of ``state``. Errors as `chunk`.
        """
        body = State()
        body.CopyFrom(state)
        body.num_hidden_rows = 0 if hidden is None else hidden.shape[0]
        body.num_bytes = 0 if hidden is None else hidden.nbytes
        self._enqueue(ticket, body, HIDDEN, None if hidden is None else hidden.contiguous().reshape(-1))

    def abort(self, ticket: str, reason: str) -> None:
        """Give a hand-off up: what is queued is dropped, an Abort follows; the receiver's Failed makes it terminal.
        Nothing happens when it is terminal or aborting already."""
        with self._cond:
            if ticket in self._tickets and self._dead is None:
                self._abort_locked(ticket, reason)

    def acknowledge(self, ack: HandoffAck) -> None:
        """Take the receiver's answer. Answers about tickets that are not open are ignored, but an unknown Cancelled
        is answered with Abort, since the receiver waits for it."""
        kind = ack.WhichOneof("body")
        with self._cond:
            ticket = self._tickets.get(ack.ticket)
            if self._dead is not None:
                return
            if kind == "cancelled":
                self._abort_locked(ack.ticket, "cancelled by the receiver")
                return
            if kind not in ("ready", "failed") or ticket is None:
                return
            if kind == "ready" and ticket.phase is _Phase.OPEN:
                return  # no State was queued: not an answer to this hand-off
            self._outbox.drop(ack.ticket)
            ticket.final = ticket.final or ack
            self._cond.notify_all()
        self._tell(ack.ticket)

    # -- questions ---------------------------------------------------------------------------------------------

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """Bytes sent of an open ticket, or of one of the latest ended ones, by class; META counts control messages."""
        with self._cond:
            record = self._tickets.get(ticket)
            return dict(record.bytes_sent if record is not None else self._ended.get(ticket, {}))

    @property
    def open_tickets(self) -> tuple[str, ...]:
        """Tickets that are neither terminal nor failed."""
        with self._cond:
            return tuple(self._tickets)

    @property
    def alive(self) -> bool:
        """The link can still be used."""
        return self._dead is None

    # -- end of the link ---------------------------------------------------------------------------------------

    def link_lost(self, reason: str) -> None:
        """The peer is gone (sentinel, control stream, lease): fail every ticket; the one on the wire once its
        blocked send has returned."""
        self._die(reason, tell_owner=True)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop, and close the transport; tickets without an acknowledgement fail. True when the thread ended within
        ``timeout_s``; False when a send is still blocked (its ticket fails when it returns)."""
        self._closing = True
        self._die("link closed", tell_owner=False)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._transport.close()
        return not self._thread.is_alive()

    # -- insides -----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise TransportError(f"link is dead: {self._dead}")

    def _enqueue(
        self, ticket: str, body: Begin | Chunk | State, byte_class: ByteClass = META, data: Tensor | None = None
    ) -> None:
        """Wait for room, then append; refuses or drops as `chunk` says."""
        item = Outgoing(_message(ticket, body), byte_class, data, _record_event(data))
        deadline = time.monotonic() + self._enqueue_timeout_s
        with self._cond:
            while True:
                self._check_alive()
                record = self._tickets.get(ticket)
                if record is None or record.final is not None or record.phase is _Phase.ENDED:
                    raise HandoffFailed(f"hand-off {ticket} is not open")
                if record.phase is _Phase.ABORTING:
                    return
                if self._outbox.has_room(item.num_bytes):
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded(f"hand-off {ticket}: no room to send within {self._enqueue_timeout_s:g} s")
                self._cond.wait(remaining)
            if isinstance(body, State):
                record.phase = _Phase.ENDED
            self._outbox.append(item)
            self._cond.notify_all()

    def _abort_locked(self, ticket: str, reason: str) -> None:
        record = self._tickets.get(ticket)
        if record is not None:
            if record.phase is _Phase.ABORTING or record.final is not None:
                return
            record.phase = _Phase.ABORTING
            self._outbox.drop(ticket)
        self._outbox.append(Outgoing(_message(ticket, Abort(reason=reason)), META))
        self._cond.notify_all()

    def _run(self) -> None:
        while (item := self._next_item()) is not None:
            began = time.monotonic()
            try:
                self._post(item.message)
                if item.data is not None:
                    if item.produced is not None:
                        item.produced.synchronize()
                    self._transport.send(item.data)
            except Exception as error:
                self._off_wire(item, sent=False)
                self._die(str(error) or repr(error), tell_owner=True)
            else:
                if self._on_sent is not None:
                    self._call(self._on_sent, item.message, began)
                self._off_wire(item, sent=True)
            self._tell(item.message.ticket)

    def _next_item(self) -> Outgoing | None:
        with self._cond:
            while not self._outbox and self._dead is None:
                self._cond.wait()
            return self._outbox.take() if self._dead is None else None

    def _off_wire(self, item: Outgoing, *, sent: bool) -> None:
        with self._cond:
            self._outbox.done()
            record = self._tickets.get(item.message.ticket)
            if sent and record is not None:
                counts = record.bytes_sent
                counts[META] = counts.get(META, 0) + item.message.ByteSize()
                if item.data is not None:
                    counts[item.byte_class] = counts.get(item.byte_class, 0) + item.num_bytes
            self._cond.notify_all()

    def _die(self, reason: str, *, tell_owner: bool) -> None:
        with self._cond:
            first = self._dead is None
            if first:
                self._dead = reason
                self._outbox.drop()
                for record in self._tickets.values():
                    record.final = record.final or reason
            tickets = tuple(self._tickets)
            self._cond.notify_all()
        if not first:
            return
        self._transport.abort()
        for ticket in tickets:
            self._tell(ticket)
        if tell_owner and not self._closing:
            self._call(self._on_link_lost, reason)

    def _tell(self, ticket: str) -> None:
        """Tell the end of a ticket, once, when it has one and none of its bytes are on the wire."""
        with self._cond:
            record = self._tickets.get(ticket)
            wire = self._outbox.wire
            if record is None or record.final is None or (wire is not None and wire.message.ticket == ticket):
                return
            final = record.final
            del self._tickets[ticket]
            self._ended[ticket] = record.bytes_sent
            while len(self._ended) > MAX_REMEMBERED_TICKETS:
                self._ended.popitem(last=False)
        if isinstance(final, str):
            self._call(self._on_failed, ticket, final)
        else:
            self._call(self._on_terminal, ticket, final)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        """An owner's error must not stop the link."""
        try:
            callback(*args)
        except Exception:
            log.exception("hand-off callback failed")


def _message(ticket: str, body: Begin | Chunk | State | Abort) -> HandoffMessage:
    match body:
        case Begin():
            return HandoffMessage(ticket=ticket, begin=body)
        case Chunk():
            return HandoffMessage(ticket=ticket, chunk=body)
        case State():
            return HandoffMessage(ticket=ticket, state=body)
        case Abort():
            return HandoffMessage(ticket=ticket, abort=body)


def _record_event(data: Tensor | None) -> torch.cuda.Event | None:
    if data is None or not data.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
