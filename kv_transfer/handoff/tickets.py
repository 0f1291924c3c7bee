"""What a sending end keeps of each hand-off: where it stands, what was sent of it, who still reads its rows."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.handoff.block import META, ByteClass
from kv_transfer.handoff.outbox import Outbox, Outgoing
from paceline.errors import HandoffFailed
from paceline.v1.handoff_pb2 import Abort, HandoffAck

log = logging.getLogger(__name__)

MAX_REMEMBERED_TICKETS = 1024


class Phase(Enum):
    """Where an open ticket stands; the edges are in sender.py."""

    OPEN = auto()  # Begin is queued or sent
    ENDED = auto()  # State is queued or sent
    ABORTING = auto()  # Abort is queued or sent; waits for the receiver's Failed


@dataclass
class Ticket:
    """One hand-off at its sender."""

    phase: Phase = Phase.OPEN
    bytes_sent: dict[ByteClass, int] = field(default_factory=dict)
    sending_s: float = 0.0  # in which its bytes were on the wire
    readers: int = 0  # of its source rows; its end waits for them
    final: HandoffAck | str | None = None  # the ack that ended it, or the reason of its failure; told when off the wire

    @property
    def takes_rows(self) -> bool:
        """Rows queued now would be sent."""
        return self.phase is Phase.OPEN and self.final is None

    def count(self, item: Outgoing, num_bytes: int, took_s: float) -> None:
        """``num_bytes`` of ``item`` were sent, in ``took_s`` seconds; its descriptor counts with the last of them."""
        counts = self.bytes_sent
        if not item.unsent:
            counts[META] = counts.get(META, 0) + item.message.ByteSize()
        if num_bytes:
            counts[item.byte_class] = counts.get(item.byte_class, 0) + num_bytes
            self.sending_s += took_s


class TicketBook:
    """The open tickets of a link, and the latest that ended. Guarded by ``outbox.changed``: methods take it, but
    `admit` and `count`, whose callers hold it.

    ``on_ended(ticket, end)``: told once, with no lock held, by whoever brings the last missing piece: the end itself,
    the last of its bytes, or the last of its readers.
    """

    def __init__(self, outbox: Outbox, on_ended: Callable[[str, HandoffAck | str], None]) -> None:
        self._outbox = outbox
        self._on_ended = on_ended
        self._open: dict[str, Ticket] = {}
        self._ended: OrderedDict[str, Ticket] = OrderedDict()

    def open(self, ticket: str) -> None:
        """A hand-off begins. HandoffFailed when the ticket is open already."""
        with self._outbox.changed:
            if ticket in self._open:
                raise HandoffFailed(f"hand-off {ticket} was begun already")
            self._open[ticket] = Ticket()

    def forget(self, ticket: str) -> None:
        """A hand-off whose Begin found no room was never opened."""
        with self._outbox.changed:
            self._open.pop(ticket, None)

    def admit(self, ticket: str) -> Ticket | None:
        """The ticket, which takes a message now; None: drop the message, an Abort is under way. HandoffFailed when it
        is not open (any more)."""
        record = self._open.get(ticket)
        if record is None or record.final is not None or record.phase is Phase.ENDED:
            raise HandoffFailed(f"hand-off {ticket} is not open")
        return None if record.phase is Phase.ABORTING else record

    @contextmanager
    def reading(self, ticket: str) -> Iterator[bool]:
        """See `HandoffSender.reading`."""
        with self._outbox.changed:
            record = self._open.get(ticket)
            wanted = record is not None and record.takes_rows
            if record is not None:
                record.readers += 1
        try:
            yield wanted
        finally:
            if record is not None:
                with self._outbox.changed:
                    record.readers -= 1
                self.tell(ticket)

    def abort(self, ticket: str, reason: str) -> None:
        """See `HandoffSender.abort`. The Abort is queued, not announced."""
        with self._outbox.changed:
            if ticket in self._open and self._outbox.closed is None:
                self._queue_abort(ticket, reason)

    def acknowledge(self, ack: HandoffAck) -> None:
        """See `HandoffSender.acknowledge`. An Abort in answer is queued, not announced."""
        kind = ack.WhichOneof("body")
        with self._outbox.changed:
            record = self._open.get(ack.ticket)
            if self._outbox.closed is not None:
                return
            if kind == "cancelled":
                self._queue_abort(ack.ticket, "cancelled by the receiver")
                return
            if kind not in ("ready", "failed") or record is None:
                return
            if kind == "ready" and record.phase is Phase.OPEN:
                return  # no State was queued: not an answer to this hand-off
            self._outbox.drop(ack.ticket)
            record.final = record.final or ack
            self._outbox.changed.notify_all()
        self.tell(ack.ticket)

    def fail_all(self, reason: str) -> tuple[str, ...]:
        """The link is dead: every open ticket fails, and is to be told. Which they are."""
        with self._outbox.changed:
            for record in self._open.values():
                record.final = record.final or reason
            return tuple(self._open)

    def count(self, item: Outgoing, num_bytes: int, took_s: float) -> None:
        """See `Ticket.count`. Nothing is counted of a ticket that is not open."""
        if (record := self._open.get(item.message.ticket)) is not None:
            record.count(item, num_bytes, took_s)

    def tell(self, ticket: str) -> None:
        """Tell the end of a ticket, once, when it has one, nothing of it is to be sent and no row of it is read."""
        with self._outbox.changed:
            record = self._open.get(ticket)
            if record is None or record.final is None or record.readers or self._outbox.must_send(ticket):
                return
            self._ended[ticket] = self._open.pop(ticket)
            self._ended.move_to_end(ticket)
            while len(self._ended) > MAX_REMEMBERED_TICKETS:
                self._ended.popitem(last=False)
        tell_owner(self._on_ended, ticket, record.final)

    def known(self, ticket: str) -> Ticket:
        """An open one, one of the latest ended ones, or an empty one."""
        with self._outbox.changed:
            return self._open.get(ticket) or self._ended.get(ticket) or Ticket()

    @property
    def names(self) -> tuple[str, ...]:
        """The open tickets."""
        with self._outbox.changed:
            return tuple(self._open)

    def _queue_abort(self, ticket: str, reason: str) -> None:
        record = self._open.get(ticket)
        if record is not None:
            if record.phase is Phase.ABORTING or record.final is not None:
                return
            record.phase = Phase.ABORTING
            self._outbox.drop(ticket)
        self._outbox.append(Outgoing.of(ticket, Abort(reason=reason)))


def tell_owner(callback: Callable[..., None], *args: object) -> None:
    """Call back; an owner's error must not stop the link."""
    try:
        callback(*args)
    except Exception:
        log.exception("hand-off callback failed")
