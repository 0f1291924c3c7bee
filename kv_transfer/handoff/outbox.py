"""The queue of a link's sending end: bounded in bytes, in messages, and by the receiver's credit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.handoff.block import META, ByteClass
from kv_transfer.transports.base import WINDOW_BYTES, Pending
from paceline.v1.handoff_pb2 import Abort, Begin, Chunk, HandoffMessage, State

MAX_QUEUED_MESSAGES = 4096

Body = Begin | Chunk | State | Abort


def nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Beside:
    """What goes over the lanes of a link together with a message (kv_transfer/lanes). ``start``: as
    `Transport.start_send`; ``num_bytes``: on all lanes."""

    start: Callable[[], Pending]
    num_bytes: int


@dataclass(frozen=True)
class Payload:
    """The bytes of one message."""

    data: Tensor  # flat and contiguous
    produced: torch.cuda.Event | None  # has happened when ``data`` is filled
    done: Callable[[], None]  # told once, when ``data`` is sent or dropped; must not block
    beside: Beside | None = None

    @classmethod
    def of(cls, data: Tensor, done: Callable[[], None] = nothing, beside: Beside | None = None) -> Payload:
        """``data`` is filled when what the caller's current stream holds is done. ValueError when it has gaps."""
        if data.dim() != 1 or not data.is_contiguous():
            raise ValueError("chunk data must be flat and contiguous")
        event = None
        if data.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(data, event, done, beside)


@dataclass(eq=False)
class Outgoing:
    """A control message and the bytes that it announces, which may be given later, message by message."""

    message: HandoffMessage
    byte_class: ByteClass
    num_bytes: int  # that are announced
    payloads: deque[Payload]  # given, not due
    unsent: int = 0  # bytes that are not off yet
    began: float | None = None  # when the first of them left, monotonic clock
    announced: bool = False
    dropped: bool = False

    @classmethod
    def of(cls, ticket: str, body: Body, byte_class: ByteClass = META, num_bytes: int = 0) -> Outgoing:
        """A message about ``ticket``, with no payload yet."""
        return cls(_message(ticket, body), byte_class, num_bytes, deque(), num_bytes)

    def give(self, payload: Payload) -> None:
        """Add its next bytes; they are dropped with it."""
        if self.dropped:
            payload.done()
        else:
            self.payloads.append(payload)


class Outbox:
    """First in, first out: QUEUED --announced, as far as credit goes--> ANNOUNCED --all sent--> gone.

    What is announced must be sent, whatever becomes of its ticket: the receiver waits for the bytes. ``changed`` is
    the one lock of a sending end: it guards the outbox, the tickets and the pump, is held around every call, and is
    notified of every change. Nothing is written to the wire under it.
    """

    def __init__(self, max_bytes: int, multiple: int = 1) -> None:
        """multiple: see `Transport`."""
        self.changed = threading.Condition()
        self.closed: str | None = None  # why the link is dead
        self._max_bytes, self._multiple = max_bytes, multiple
        self._queued: deque[Outgoing] = deque()
        self._announced: deque[Outgoing] = deque()
        self._in_hand: list[Outgoing] = []  # once for each message that the transport has, on a dead link too
        self._waiting_bytes = 0  # of what is queued or announced
        self._uncredited = 0  # bytes announced that the receiver has not taken in

    def __len__(self) -> int:
        """Items that are not off yet."""
        return len(self._queued) + len(self._announced)

    @property
    def waits_for_credit(self) -> bool:
        """Something is queued, and nothing announced is left to send."""
        return bool(self._queued) and not self._announced

    def has_room(self, num_bytes: int) -> bool:
        """Room for ``num_bytes``; anything fits when no bytes wait, so that one large chunk cannot wait for ever."""
        fits = self._waiting_bytes == 0 or self._waiting_bytes + num_bytes <= self._max_bytes
        return len(self) < MAX_QUEUED_MESSAGES and fits

    def append(self, item: Outgoing) -> None:
        """Queue a message behind all others. Ask `has_room` first."""
        self._queued.append(item)
        self._waiting_bytes += item.num_bytes

    def announce(self) -> Iterator[Outgoing]:
        """What to post and start now, in order, as far as the receiver's credit goes."""
        while self._queued and (not self._queued[0].num_bytes or self._uncredited < WINDOW_BYTES * self._multiple):
            item = self._queued.popleft()
            self._uncredited += item.num_bytes
            self._announced.append(item)
            item.announced = True
            yield item

    def sent(self, item: Outgoing) -> None:
        """An announced item is off whole."""
        self._announced.remove(item)
        self._waiting_bytes -= item.num_bytes

    def credit(self, num_bytes: int) -> None:
        """The receiver has taken ``num_bytes`` more in."""
        self._uncredited = max(0, self._uncredited - num_bytes)

    def hold(self, item: Outgoing) -> None:
        """The transport gets a message of ``item``; until `let_go` its ticket cannot end."""
        self._in_hand.append(item)

    def let_go(self, item: Outgoing) -> None:
        """Undo one `hold`: the transport is done with that message."""
        self._in_hand.remove(item)

    def must_send(self, ticket: str) -> bool:
        """Something of ``ticket`` is announced and not off yet, or in the hands of the transport."""
        return any(item.message.ticket == ticket for item in (*self._announced, *self._in_hand))

    def drop(self, ticket: str) -> None:
        """Forget what is queued of a ticket."""
        items, self._queued = self._queued, deque()
        for item in items:
            if item.message.ticket == ticket:
                self._forget(item)
            else:
                self._queued.append(item)

    def close(self, reason: str) -> None:
        """The link is dead: forget everything. The pump tells the payloads done that are due or started."""
        self.closed = reason
        for item in (*self._announced, *self._queued):
            self._forget(item)
        self._announced.clear()
        self._queued.clear()

    def _forget(self, item: Outgoing) -> None:
        self._waiting_bytes -= item.num_bytes
        item.dropped = True
        for payload in item.payloads:
            payload.done()
        item.payloads.clear()


def _message(ticket: str, body: Body) -> HandoffMessage:
    match body:
        case Begin():
            return HandoffMessage(ticket=ticket, begin=body)
        case Chunk():
            return HandoffMessage(ticket=ticket, chunk=body)
        case State():
            return HandoffMessage(ticket=ticket, state=body)
        case Abort():
            return HandoffMessage(ticket=ticket, abort=body)
