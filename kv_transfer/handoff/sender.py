"""The prefill side of a link: what is queued is announced and started at once, one thread sees it through.

Queue: produced by the owner (`begin`, `chunk`, `state`, `abort`) and by acknowledgements (an Abort in answer to
Cancelled); consumed in order by the sender thread. Bounded in bytes and in messages. Bytes are announced only while
the receiver's credit lasts: one that is behind finds no sockets full, and lets no message run into its timeout.

Life of a ticket here, one event per edge:

    (none) --begin--> OPEN --state--> ENDED --Ready--> (terminal)
                       |               |
                       +--abort / Cancelled--> ABORTING     (what is not announced is dropped, an Abort follows)
      OPEN, ENDED, ABORTING --Failed ack--> (terminal)
      OPEN, ENDED, ABORTING --link lost, close--> (failed)

Terminal and failed are told once, by `on_terminal` or `on_failed`, and only when no announced bytes of the ticket are
left to send and nobody is `reading` its rows any more: these may then be overwritten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from kv_transfer.handoff.block import HIDDEN, ByteClass, RowBlock
from kv_transfer.handoff.checksum import crc32
from kv_transfer.handoff.cut import message_sizes
from kv_transfer.handoff.outbox import Outbox, Outgoing, Part, nothing
from kv_transfer.handoff.posted import Started, Wire
from kv_transfer.handoff.tickets import Phase, Ticket, Tickets
from kv_transfer.transports.base import Transport, TransportError
from paceline.errors import DeadlineExceeded, HandoffFailed
from paceline.v1.handoff_pb2 import Abort, Begin, HandoffAck, HandoffMessage, State

log = logging.getLogger(__name__)


class HandoffSender:
    """One link's sender.

    ``post``: puts a message on the control stream; thread-safe, never blocks, keeps the order. Called under a lock.
    ``on_terminal(ticket, ack)``: Ready or Failed arrived, the source pages may go.
    ``on_failed(ticket, reason)``: the link died or was closed first; the source pages may go.
    ``on_link_lost(reason)``: once, when the link dies (not on ``close``).
    ``on_sent(message, began)``: a message's bytes are off; sending them began at ``began``, monotonic.
    ``enqueue_timeout_s``: longest wait of the owner for room, and of the thread for credit.
    ``checksums``: each message carries a sum of its bytes, taken on the thread that queues it; host memory only.
    Callbacks run on the sender thread, or on the one that called ``acknowledge``, ``link_lost`` or ``reading``, with no
    lock held.
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
        checksums: bool = False,
    ) -> None:
        self._transport = transport
        self._wire = Wire(transport)
        self._post = post
        self._on_terminal = on_terminal
        self._on_failed = on_failed
        self._on_link_lost = on_link_lost
        self._on_sent = on_sent
        self._enqueue_timeout_s = enqueue_timeout_s
        self.checksums = checksums
        self._cond = threading.Condition()
        self._outbox = Outbox(max_queued_bytes)
        self._tickets = Tickets()
        self._started: deque[Started] = deque()  # of what the outbox has announced
        self._on_wire: Outgoing | None = None  # what the thread waits for
        self._last_end = 0.0  # of the latest message
        self._broken: str | None = None  # why the thread is to end the link
        self._dead: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="handoff-sender", daemon=True)
        self._thread.start()

    # -- the owner's events ------------------------------------------------------------------------------------

    def begin(self, ticket: str, tokens: range, reshard: str = "") -> None:
        """Open a hand-off of the rows of ``tokens``, cut as the plan named ``reshard`` says. TransportError when the
        link is dead, HandoffFailed when the ticket is open already."""
        with self._cond:
            self._check_alive()
            if ticket in self._tickets:
                raise HandoffFailed(f"hand-off {ticket} was begun already")
            self._tickets[ticket] = Ticket()
        try:
            begin = Begin(num_tokens=len(tokens), first_token=tokens.start, reshard=reshard)
            self._enqueue(Outgoing.of(ticket, begin))
        except DeadlineExceeded:
            with self._cond:
                self._tickets.pop(ticket, None)
            raise

    def chunk(self, ticket: str, block: RowBlock, data: Tensor, done: Callable[[], None] = nothing) -> None:
        """Queue rows of one message in canonical order; ``data``: flat, contiguous, not written to until ``done`` is
        called, which happens once, whether it was sent, dropped or refused. ``done`` must not block.

        Blocks while ``max_queued_bytes`` wait (DeadlineExceeded after ``enqueue_timeout_s``). Dropped without an error
        when the receiver cancelled; HandoffFailed when the ticket is not open (any more), TransportError when the
        link is dead.
        """
        body = block.to_proto(data.nbytes, crc32(data) if self.checksums else None)
        item = Outgoing.of(ticket, body, block.byte_class, data.nbytes)
        sizes = message_sizes(item.message)
        if len(sizes) > 1:
            done()
            raise ValueError(f"{data.nbytes} bytes are several messages: open the chunk and give them one by one")
        if sizes:
            item.give(Part.of(data, done))
        queued = False
        try:
            queued = self._enqueue(item)
        finally:
            if not queued or not sizes:
                done()

    def open_chunk(self, ticket: str, block: RowBlock, num_bytes: int) -> Outgoing | None:
        """Queue rows whose bytes come with `give`, cut as `cut.messages` says: every message of them, whatever
        becomes of the ticket meanwhile, before anything else with bytes is queued. Not with ``checksums``. Errors as
        `chunk`; None where that drops.
        """
        item = Outgoing.of(ticket, block.to_proto(num_bytes), block.byte_class, num_bytes)
        return item if self._enqueue(item) else None

    def give(self, chunk: Outgoing, data: Tensor, done: Callable[[], None]) -> bool:
        """The next message of an open chunk; as `chunk`'s data. False: the chunk was dropped, no more is wanted."""
        part = Part.of(data, done)
        with self._cond:
            chunk.give(part)
            if chunk.announced and not chunk.dropped:
                self._start_locked(chunk)
                self._cond.notify_all()
            return not chunk.dropped

    @contextmanager
    def reading(self, ticket: str) -> Iterator[bool]:
        """Hold back the end of an open ticket, inside, while its source rows are read. False when it is not open (any
        more): the rows may be somebody else's then and are not to be read."""
        with self._cond:
            record = self._tickets.get(ticket)
            wanted = record is not None and record.takes_rows
            if record is not None:
                record.readers += 1
        try:
            yield wanted
        finally:
            if record is not None:
                with self._cond:
                    record.readers -= 1
                self._tell(ticket)

    def state(self, ticket: str, state: State, hidden: Tensor | None = None) -> None:
        """Queue the seed of decoding; ends the hand-off. ``hidden``: [num_hidden_rows, hidden_size], or None.

        Sets num_hidden_rows, num_bytes and checksum of a copy of ``state``. Errors as `chunk`.
        """
        body = State()
        body.CopyFrom(state)
        body.num_hidden_rows = 0 if hidden is None else hidden.shape[0]
        data = None if hidden is None else hidden.contiguous().reshape(-1)
        body.num_bytes = 0 if data is None else data.nbytes
        if self.checksums:
            body.checksum = 0 if data is None else crc32(data)
        item = Outgoing.of(ticket, body, HIDDEN, body.num_bytes)
        if data is not None and data.numel():
            item.give(Part.of(data))
        self._enqueue(item)

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
            if kind == "credit":
                self._outbox.credit(ack.credit.num_bytes)
                self._announce_locked()
                return
            if kind == "cancelled":
                self._abort_locked(ack.ticket, "cancelled by the receiver")
                return
            if kind not in ("ready", "failed") or ticket is None:
                return
            if kind == "ready" and ticket.phase is Phase.OPEN:
                return  # no State was queued: not an answer to this hand-off
            self._outbox.drop(ack.ticket)
            ticket.final = ticket.final or ack
            self._cond.notify_all()
        self._tell(ack.ticket)

    # -- questions ---------------------------------------------------------------------------------------------

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """Bytes sent of an open ticket, or of one of the latest ended ones, by class; META counts control messages."""
        with self._cond:
            return dict(self._tickets.known(ticket).bytes_sent)

    def sending_s(self, ticket: str) -> float:
        """Seconds in which bytes of a ticket were being sent, of the same tickets."""
        with self._cond:
            return self._tickets.known(ticket).sending_s

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

    def _enqueue(self, item: Outgoing) -> bool:
        """Wait for room, then append: True. Refuses or drops as `chunk` says."""
        ticket = item.message.ticket
        deadline = time.monotonic() + self._enqueue_timeout_s
        with self._cond:
            while True:
                self._check_alive()
                record = self._tickets.get(ticket)
                if record is None or record.final is not None or record.phase is Phase.ENDED:
                    raise HandoffFailed(f"hand-off {ticket} is not open")
                if record.phase is Phase.ABORTING:
                    return False
                if self._outbox.has_room(item.num_bytes):
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded(f"hand-off {ticket}: no room to send within {self._enqueue_timeout_s:g} s")
                self._cond.wait(remaining)
            if item.message.HasField("state"):
                record.phase = Phase.ENDED
            self._outbox.append(item)
            self._announce_locked()
            return True

    def _abort_locked(self, ticket: str, reason: str) -> None:
        record = self._tickets.get(ticket)
        if record is not None:
            if record.phase is Phase.ABORTING or record.final is not None:
                return
            record.phase = Phase.ABORTING
            self._outbox.drop(ticket)
        self._outbox.append(Outgoing.of(ticket, Abort(reason=reason)))
        self._announce_locked()

    def _announce_locked(self) -> None:
        """Bytes are under way as soon as they are announced: neither waits for the thread to be done with others."""
        try:
            for item in self._outbox.announce():
                self._post(item.message)
                self._start_locked(item)
        except Exception as error:
            self._broken = self._broken or str(error) or repr(error)
        self._cond.notify_all()

    def _start_locked(self, item: Outgoing) -> None:
        """What was given of an announced item."""
        if not item.num_bytes:
            self._started.append(self._wire.start(item))
        while item.parts:
            self._started.append(self._wire.start(item, item.parts.popleft()))

    def _run(self) -> None:
        while (started := self._next()) is not None:
            item, part = started.item, started.part
            began = max(started.began, self._last_end)
            if item.began is None:
                item.began = began
            try:
                started.wait()
            except Exception as error:
                self._die(str(error) or repr(error), tell_owner=True)
                self._off_wire(item, part, None)
                return
            took_s = time.monotonic() - began
            num_bytes = part.data.nbytes if part is not None else 0
            if self._on_sent is not None and item.unsent == num_bytes:
                self._call(self._on_sent, item.message, item.began)
            self._last_end = time.monotonic()
            self._off_wire(item, part, took_s)

    def _next(self) -> Started | None:
        """The next message on the wire; waits for one. None: the link is dead."""
        with self._cond:
            while self._dead is None and self._broken is None:
                if self._started:
                    started = self._started.popleft()
                    self._on_wire = started.item
                    return started
                if not self._outbox.waits_for_credit:
                    self._cond.wait()
                elif not self._cond.wait_for(self._unstuck, self._enqueue_timeout_s):
                    self._broken = f"no credit from the receiver within {self._enqueue_timeout_s:g} s"
            broken = self._broken
        if broken is not None:
            self._die(broken, tell_owner=True)
        return None

    def _unstuck(self) -> bool:
        """The thread does not wait for credit (any more)."""
        over = self._dead is not None or self._broken is not None
        return over or bool(self._started) or not self._outbox.waits_for_credit

    def _off_wire(self, item: Outgoing, part: Part | None, took_s: float | None) -> None:
        """The wait for a message has ended; None: the link broke in the midst of it."""
        with self._cond:
            self._on_wire = None
            num_bytes = part.data.nbytes if part is not None else 0
            item.unsent -= num_bytes
            if not item.unsent and not item.dropped:
                self._outbox.sent(item)
            record = self._tickets.get(item.message.ticket)
            if record is not None and took_s is not None:
                record.count(item, num_bytes, took_s)
            if part is not None:
                part.done()
            self._cond.notify_all()
        self._tell(item.message.ticket)

    def _die(self, reason: str, *, tell_owner: bool) -> None:
        with self._cond:
            first = self._dead is None
            if first:
                self._dead = reason
                self._outbox.drop_all()
                for started in self._started:
                    if started.part is not None:
                        started.part.done()
                self._started.clear()
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
        """Tell the end of a ticket, once, when it has one, nothing of it is to be sent and no row of it is read."""
        with self._cond:
            record = self._tickets.get(ticket)
            if record is None or record.final is None or record.readers or self._must_send(ticket):
                return
            final = record.final
            self._tickets.end(ticket)
        if isinstance(final, str):
            self._call(self._on_failed, ticket, final)
        else:
            self._call(self._on_terminal, ticket, final)

    def _must_send(self, ticket: str) -> bool:
        """Something of ``ticket`` is announced and not off yet."""
        on_wire = self._on_wire is not None and self._on_wire.message.ticket == ticket
        return on_wire or self._outbox.must_send(ticket)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        """An owner's error must not stop the link."""
        try:
            callback(*args)
        except Exception:
            log.exception("hand-off callback failed")
