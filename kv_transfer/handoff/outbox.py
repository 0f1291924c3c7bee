"""The queue between the owner of a link and its sender thread: bounded in bytes, in messages, and by the receiver's
credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.handoff.block import META, ByteClass
from kv_transfer.transports.base import WINDOW_BYTES
from paceline.v1.handoff_pb2 import Abort, Begin, Chunk, HandoffMessage, State

MAX_QUEUED_MESSAGES = 4096

Body = Begin | Chunk | State | Abort


def nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Part:
    """Bytes of one message."""

    data: Tensor  # flat and contiguous
    produced: torch.cuda.Event | None  # has happened when ``data`` is filled
    done: Callable[[], None]  # told once, when ``data`` is sent or dropped; must not block

    @classmethod
    def of(cls, data: Tensor, done: Callable[[], None] = nothing) -> Part:
        """``data`` is filled when what the caller's current stream holds is done. ValueError when it has gaps."""
        if data.dim() != 1 or not data.is_contiguous():
            raise ValueError("chunk data must be flat and contiguous")
        event = None
        if data.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(data, event, done)


@dataclass(eq=False)
class Outgoing:
    """A control message and the bytes that it announces, which may be given later, in parts."""

    message: HandoffMessage
    byte_class: ByteClass
    num_bytes: int  # that are announced
    parts: deque[Part]  # given, not started
    unsent: int = 0  # bytes that are not off yet
    began: float | None = None  # when the first of them left, monotonic clock
    announced: bool = False
    dropped: bool = False

    @classmethod
    def of(cls, ticket: str, body: Body, byte_class: ByteClass = META, num_bytes: int = 0) -> Outgoing:
        """Of a ticket, with no part yet."""
        return cls(_message(ticket, body), byte_class, num_bytes, deque(), num_bytes)

    def give(self, part: Part) -> None:
        """Its next bytes; dropped with it."""
        if self.dropped:
            part.done()
        else:
            self.parts.append(part)


class Outbox:
    """First in, first out: QUEUED --announced, as far as credit goes--> ANNOUNCED --all sent--> gone.

    What is announced must be sent, whatever becomes of its ticket: the receiver waits for the bytes. Not thread-safe:
    the sender holds its own lock around every call.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queued: deque[Outgoing] = deque()
        self._announced: deque[Outgoing] = deque()
        self._waiting_bytes = 0  # of both
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
        self._queued.append(item)
        self._waiting_bytes += item.num_bytes

    def announce(self) -> Iterator[Outgoing]:
        """What to post and start now, in order: as far as the receiver's credit goes."""
        while self._queued and (not self._queued[0].num_bytes or self._uncredited < WINDOW_BYTES):
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

    def must_send(self, ticket: str) -> bool:
        """Something of ``ticket`` is announced and not off yet."""
        return any(item.message.ticket == ticket for item in self._announced)

    def drop(self, ticket: str) -> None:
        """Forget what is queued of a ticket."""
        items, self._queued = self._queued, deque()
        for item in items:
            if item.message.ticket == ticket:
                self._forget(item)
            else:
                self._queued.append(item)

    def drop_all(self) -> None:
        """The link is dead: forget everything. Started parts are told done by whoever waits for them."""
        for item in (*self._announced, *self._queued):
            self._forget(item)
        self._announced.clear()
        self._queued.clear()

    def _forget(self, item: Outgoing) -> None:
        self._waiting_bytes -= item.num_bytes
        item.dropped = True
        for part in item.parts:
            part.done()
        item.parts.clear()


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
