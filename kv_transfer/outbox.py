"""The queue between the owner of a link and its sender thread: bounded in bytes, in messages, and by the receiver's
credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.handoff import META, ByteClass
from kv_transfer.transport import WINDOW_BYTES
from paceline.v1.handoff_pb2 import Abort, Begin, Chunk, HandoffMessage, State

MAX_QUEUED_MESSAGES = 4096

Body = Begin | Chunk | State | Abort


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Outgoing:
    """A control message and the bytes that it announces."""

    message: HandoffMessage
    byte_class: ByteClass  # of ``data``
    data: Tensor | None = None  # flat and contiguous
    produced: torch.cuda.Event | None = None  # has happened when ``data`` is filled
    done: Callable[[], None] = _nothing  # told once, when ``data`` is sent or dropped; must not block

    @classmethod
    def of(
        cls,
        ticket: str,
        body: Body,
        byte_class: ByteClass = META,
        data: Tensor | None = None,
        done: Callable[[], None] = _nothing,
    ) -> Outgoing:
        """``data`` is filled when what the caller's current stream holds is done."""
        event = None
        if data is not None and data.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(_message(ticket, body), byte_class, data, event, done)

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else self.data.nbytes


class Outbox:
    """First in, first out: QUEUED --announced, as far as credit goes--> ANNOUNCED --taken--> WIRE --done--> gone.

    What is announced must be sent, whatever becomes of its ticket: the receiver waits for the bytes. Not thread-safe:
    the sender holds its own lock around every call.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queued: deque[Outgoing] = deque()
        self._announced: deque[Outgoing] = deque()
        self._waiting_bytes = 0  # of both and the wire
        self._uncredited = 0  # bytes announced that the receiver has not taken in
        self.wire: deque[Outgoing] = deque()

    def __len__(self) -> int:
        """Items that are not on the wire yet."""
        return len(self._queued) + len(self._announced)

    @property
    def ready(self) -> bool:
        """There is something to take."""
        return bool(self._announced)

    def has_room(self, num_bytes: int) -> bool:
        """Room for ``num_bytes``; anything fits when no bytes wait, so that one large chunk cannot wait for ever."""
        fits = self._waiting_bytes == 0 or self._waiting_bytes + num_bytes <= self._max_bytes
        return len(self) < MAX_QUEUED_MESSAGES and fits

    def append(self, item: Outgoing) -> None:
        self._queued.append(item)
        self._waiting_bytes += item.num_bytes

    def announce(self) -> Iterator[Outgoing]:
        """What to post and start now, in order: as far as the receiver's credit goes."""
        while self._queued and (self._queued[0].data is None or self._uncredited < WINDOW_BYTES):
            item = self._queued.popleft()
            self._uncredited += item.num_bytes
            self._announced.append(item)
            yield item

    def take(self) -> Outgoing:
        """The next item, which is on the wire until `done`."""
        item = self._announced.popleft()
        self.wire.append(item)
        return item

    def done(self) -> None:
        """The first of those on the wire is sent, or never will be."""
        self._forget(self.wire.popleft())

    def credit(self, num_bytes: int) -> None:
        """The receiver has taken ``num_bytes`` more in."""
        self._uncredited = max(0, self._uncredited - num_bytes)

    def must_send(self, ticket: str) -> bool:
        """Something of ``ticket`` is announced or on the wire."""
        return any(item.message.ticket == ticket for item in (*self.wire, *self._announced))

    def drop(self, ticket: str) -> None:
        """Forget what is queued of a ticket."""
        items, self._queued = self._queued, deque()
        for item in items:
            if item.message.ticket == ticket:
                self._forget(item)
            else:
                self._queued.append(item)

    def drop_all(self) -> None:
        """The link is dead: forget all but what is on the wire."""
        for item in (*self._announced, *self._queued):
            self._forget(item)
        self._announced.clear()
        self._queued.clear()

    def _forget(self, item: Outgoing) -> None:
        self._waiting_bytes -= item.num_bytes
        item.done()


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
