"""The queue between the owner of a link and its sender thread: bounded in bytes and in messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.handoff import ByteClass
from paceline.v1.handoff_pb2 import HandoffMessage

MAX_QUEUED_MESSAGES = 4096


@dataclass(frozen=True)
class Outgoing:
    """A control message and the bytes that it announces."""

    message: HandoffMessage
    byte_class: ByteClass  # of ``data``
    data: Tensor | None = None  # flat and contiguous
    produced: torch.cuda.Event | None = None  # has happened when ``data`` is filled

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else self.data.nbytes


class Outbox:
    """First in, first out. Not thread-safe: the sender holds its own lock around every call."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[Outgoing] = deque()
        self._queued_bytes = 0
        self.wire: Outgoing | None = None  # taken, not done with; its bytes count as waiting

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, num_bytes: int) -> bool:
        """Room for ``num_bytes``; anything fits when no bytes wait, so that one large chunk cannot wait for ever."""
        waiting = self._queued_bytes + (self.wire.num_bytes if self.wire else 0)
        return len(self._items) < MAX_QUEUED_MESSAGES and (waiting == 0 or waiting + num_bytes <= self._max_bytes)

    def append(self, item: Outgoing) -> None:
        self._items.append(item)
        self._queued_bytes += item.num_bytes

    def take(self) -> Outgoing:
        """The next item, which is on the wire until `done`."""
        item = self._items.popleft()
        self._queued_bytes -= item.num_bytes
        self.wire = item
        return item

    def done(self) -> None:
        self.wire = None

    def drop(self, ticket: str | None = None) -> None:
        """Forget what waits of one ticket, or of all."""
        kept = [item for item in self._items if ticket is not None and item.message.ticket != ticket]
        self._items = deque(kept)
        self._queued_bytes = sum(item.num_bytes for item in kept)
