"""What a sender keeps of each hand-off: where it stands, what was sent of it, who still reads its rows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.handoff.block import META, ByteClass
from kv_transfer.handoff.outbox import Outgoing
from paceline.v1.handoff_pb2 import HandoffAck

MAX_REMEMBERED_TICKETS = 1024


class Phase(Enum):
    """Of an open ticket."""

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


class Tickets(dict[str, Ticket]):
    """The open tickets, and the latest that ended. Not thread-safe: the sender holds its lock around every call."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: OrderedDict[str, Ticket] = OrderedDict()

    def end(self, ticket: str) -> None:
        """An open ticket is over."""
        self._ended[ticket] = self.pop(ticket)
        self._ended.move_to_end(ticket)
        while len(self._ended) > MAX_REMEMBERED_TICKETS:
            self._ended.popitem(last=False)

    def known(self, ticket: str) -> Ticket:
        """An open one, one of the latest ended ones, or an empty one."""
        return self.get(ticket) or self._ended.get(ticket) or Ticket()
