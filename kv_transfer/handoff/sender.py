"""The prefill side of a link, as its owner uses it.

Queue: produced by the owner (`begin`, `chunk`, `state`, `abort`) and by acknowledgements (an Abort in answer to
Cancelled), kept in outbox.py; consumed in order by the pump (pump.py), which announces, starts and awaits. Bounded in
bytes and in messages. Bytes are announced only while the receiver's credit lasts: one that is behind finds no sockets
full, and lets no message run into its timeout. tickets.py keeps where each hand-off stands.

Life of a ticket here, one event per edge:

    (none) --begin--> OPEN --state--> ENDED --Ready--> (terminal)
                       |               |
                       +--abort / Cancelled--> ABORTING     (what is not announced is dropped, an Abort follows)
      OPEN, ENDED, ABORTING --Failed ack--> (terminal)
      OPEN, ENDED, ABORTING --link lost, close--> (failed)

Terminal and failed are told once, by `on_ended`, and only when no announced bytes of the ticket are left to send and
nobody is `reading` its rows any more: these may then be overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from kv_transfer.handoff.block import HIDDEN, ByteClass, RowBlock
from kv_transfer.handoff.cut import message_sizes
from kv_transfer.handoff.outbox import Beside, Outbox, Outgoing, Payload, nothing
from kv_transfer.handoff.pump import WirePump
from kv_transfer.handoff.tickets import Phase, TicketBook, tell_owner
from kv_transfer.transports.base import Transport, TransportError
from kv_transfer.transports.crc import crc32
from paceline.errors import DeadlineExceeded
from paceline.v1.handoff_pb2 import Begin, HandoffAck, HandoffMessage, State

MAX_QUEUED_BYTES = 64 * 1024 * 1024  # of a link whose messages are small


class HandoffSender:
    """One link's sender.

    ``post``: puts a message on the control stream; thread-safe, never blocks, keeps the order. Called under a lock.
    ``on_ended(ticket, end)``: the source pages may go. ``end``: the receiver's Ready or Failed, or in words why the
    link ended first.
    ``on_link_lost(reason)``: once, when the link dies (not on ``close``).
    ``on_sent(message, began)``: a message's bytes are off; sending them began at ``began``, monotonic.
    ``enqueue_timeout_s``: longest wait of the owner for room, and of the thread for credit.
    ``checksums``: each message carries a sum of its bytes, taken on the thread that queues it; host memory only.
    Callbacks run on the sender thread, or on one that called a method here, with no lock held.
    """

    def __init__(
        self,
        transport: Transport,
        post: Callable[[HandoffMessage], None],
        *,
        on_ended: Callable[[str, HandoffAck | str], None],
        on_link_lost: Callable[[str], None],
        on_sent: Callable[[HandoffMessage, float], None] | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        enqueue_timeout_s: float = 10.0,
        checksums: bool = False,
    ) -> None:
        self._transport = transport
        self._on_link_lost = on_link_lost
        self._enqueue_timeout_s = enqueue_timeout_s
        self.checksums = checksums
        self._closing = False
        self.multiple = transport.multiple
        self._outbox = Outbox(max_queued_bytes, self.multiple)
        self._book = TicketBook(self._outbox, on_ended)
        self._pump = WirePump(
            transport,
            post,
            self._outbox,
            self._book,
            on_broken=self._tell_lost,
            on_sent=on_sent,
            credit_timeout_s=enqueue_timeout_s,
        )

    # -- the owner's events ------------------------------------------------------------------------------------

    def begin(self, ticket: str, tokens: range, reshard: str = "", grant: bytes = b"") -> None:
        """Open a hand-off of the rows of ``tokens``, cut as the plan named ``reshard`` says. TransportError when the
        link is dead, HandoffFailed when the ticket is open already. grant: the router's word, passed on."""
        self._check_alive()
        self._book.open(ticket)
        try:
            begin = Begin(num_tokens=len(tokens), first_token=tokens.start, reshard=reshard, grant=grant)
            self._enqueue(Outgoing.of(ticket, begin))
        except (DeadlineExceeded, TransportError):
            self._book.forget(ticket)
            raise

    def chunk(
        self,
        ticket: str,
        block: RowBlock,
        data: Tensor,
        done: Callable[[], None] = nothing,
        beside: Beside | None = None,
    ) -> None:
        """Queue rows of one message in canonical order; ``data``: flat, contiguous, not written to until ``done`` is
        called, which happens once, whether it was sent, dropped or refused. ``done`` must not block. ``beside``: of the
        same rows, what leaves with them over lanes.

        Blocks while ``max_queued_bytes`` wait (DeadlineExceeded after ``enqueue_timeout_s``). Dropped without an error
        when the receiver cancelled; HandoffFailed when the ticket is not open (any more), TransportError when the
        link is dead.
        """
        body = block.to_proto(data.nbytes, crc32(data) if self.checksums else None)
        item = Outgoing.of(ticket, body, block.byte_class, data.nbytes)
        sizes = message_sizes(item.message, self.multiple)
        if len(sizes) > 1:
            done()
            raise ValueError(f"{data.nbytes} bytes are several messages: open the chunk and give them one by one")
        if sizes:
            item.give(Payload.of(data, done, beside))
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

    def give(self, chunk: Outgoing, data: Tensor, done: Callable[[], None], beside: Beside | None = None) -> bool:
        """The next message of an open chunk; as `chunk`'s data. False: the chunk was dropped, no more is wanted."""
        return self._pump.give(chunk, Payload.of(data, done, beside))

    def reading(self, ticket: str) -> AbstractContextManager[bool]:
        """Hold back the end of an open ticket, inside, while its source rows are read. False when it is not open (any
        more): the rows may be somebody else's then and are not to be read."""
        return self._book.reading(ticket)

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
            item.give(Payload.of(data))
        self._enqueue(item)

    def abort(self, ticket: str, reason: str) -> None:
        """Give a hand-off up: what is queued is dropped, an Abort follows; the receiver's Failed makes it terminal.
        Nothing happens when it is terminal or aborting already."""
        self._book.abort(ticket, reason)
        self._pump.push()

    def acknowledge(self, ack: HandoffAck) -> None:
        """Take the receiver's answer. Answers about tickets that are not open are ignored, but an unknown Cancelled
        is answered with Abort, since the receiver waits for it."""
        if ack.WhichOneof("body") == "credit":
            with self._outbox.changed:
                self._outbox.credit(ack.credit.num_bytes)
        else:
            self._book.acknowledge(ack)
        self._pump.push()

    # -- questions ---------------------------------------------------------------------------------------------

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """Bytes sent of an open ticket, or of one of the latest ended ones, by class; META counts control messages."""
        with self._outbox.changed:
            return dict(self._book.known(ticket).bytes_sent)

    def sending_s(self, ticket: str) -> float:
        """Seconds in which bytes of a ticket were being sent, of the same tickets."""
        return self._book.known(ticket).sending_s

    @property
    def open_tickets(self) -> tuple[str, ...]:
        """Tickets that are neither terminal nor failed."""
        return self._book.names

    @property
    def alive(self) -> bool:
        """The link can still be used."""
        return self._outbox.closed is None

    # -- end of the link ---------------------------------------------------------------------------------------

    def link_lost(self, reason: str) -> None:
        """The peer is gone (sentinel, control stream, lease): fail every ticket; the one on the wire once its
        blocked send has returned."""
        if self._pump.stop(reason):
            self._tell_lost(reason)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop, and close the transport; tickets without an acknowledgement fail. True when the thread ended within
        ``timeout_s``; False when a send is still blocked (its ticket fails when it returns)."""
        self._closing = True
        self._pump.stop("link closed")
        ended = self._pump.join(timeout_s)
        self._transport.close()
        return ended

    # -- insides -----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._outbox.closed is not None:
            raise TransportError(f"link is dead: {self._outbox.closed}")

    def _enqueue(self, item: Outgoing) -> bool:
        """Wait for room, then queue and let it leave: True. Refuses or drops as `chunk` says."""
        ticket, outbox = item.message.ticket, self._outbox
        deadline = time.monotonic() + self._enqueue_timeout_s
        with outbox.changed:
            while True:
                self._check_alive()
                record = self._book.admit(ticket)
                if record is None:
                    return False
                if outbox.has_room(item.num_bytes):
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded(f"hand-off {ticket}: no room to send within {self._enqueue_timeout_s:g} s")
                outbox.changed.wait(remaining)
            if item.message.HasField("state"):
                record.phase = Phase.ENDED
            outbox.append(item)
        self._pump.push()
        return True

    def _tell_lost(self, reason: str) -> None:
        if not self._closing:
            tell_owner(self._on_link_lost, reason)
