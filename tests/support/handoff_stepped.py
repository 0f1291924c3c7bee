"""The threads of a link, taken turn by turn on the caller's thread: the same code in any order that a test chooses.

A turn of the sender posts one message and sends its bytes, a turn of the receiver takes one message and its bytes; in
the midst of both (where the real threads hold no lock) ``between`` runs, so that anything else may happen there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV, RowBlock
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.staging import StagingRing
from kv_transfer.transports.base import Transport
from paceline.v1.handoff_pb2 import HandoffMessage
from prefill_node.feeder import Room, RowFeeder

MOST_MESSAGES = 6  # of a chunk: a turn of the feeder finds buffers for all of them


class _NoThread:
    """Stands for a thread that the test runs by hand."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@contextmanager
def no_threads() -> Iterator[None]:
    """Threads made inside do not run."""
    with patch("threading.Thread", _NoThread):
        yield


class Interrupted(Transport):
    """A transport on which something else happens before every message."""

    def __init__(self, inner: Transport, between: Callable[[], None]) -> None:
        self._inner = inner
        self._between = between

    def _send_message(self, data: torch.Tensor) -> None:
        self._between()
        self._inner._send_message(data)

    def _recv_message(self, data: torch.Tensor) -> None:
        self._between()
        self._inner._recv_message(data)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class SteppedSender(HandoffSender):
    """One message a turn."""

    busy = False

    def turn(self) -> bool:
        """False when there is nothing to send or no credit, or the thread is in the midst of a send."""
        if self.busy or not self._pump._started:
            return False
        self.busy = True
        try:
            if (started := self._pump._next()) is not None:
                self._pump._see_through(started)
        finally:
            self.busy = False
        return True


class SteppedReceiver(HandoffReceiver):
    """One message, or one ticket to fail, a turn; after the link's end the rest of the thread's life in one."""

    _over = False
    busy = False

    def turn(self) -> bool:
        """False when there is nothing to do, or the thread is in the midst of a receive."""
        if self.busy or self._over or (self.alive and not self._control.waiting):
            return False
        self.busy = True
        try:
            if self.alive and (work := self._control.next()) is not None:
                self._do(work)
            if not self.alive:
                self._over = True
                self._run()
        finally:
            self.busy = False
        return True

    @property
    def next_message(self) -> HandoffMessage | None:
        """What a turn would take; None: nothing, or a ticket to fail."""
        control = self._control
        return control._messages[0] if control._messages and not control._to_fail else None

    def in_flight(self, ticket: str) -> bool:
        """Begun here and not over."""
        return self._in_flight.get(ticket) is not None


class _TurnQueue:
    """A queue whose reader finds its end when its turns are used up."""

    def __init__(self) -> None:
        self.items: deque[tuple[str, Callable[[], None]] | None] = deque()
        self.turns = 0

    def put(self, item: tuple[str, Callable[[], None]] | None) -> None:
        self.items.append(item)

    def get(self) -> tuple[str, Callable[[], None]] | None:
        if self.turns == 0 or not self.items:
            return None
        self.turns -= 1
        return self.items.popleft()


class SteppedFeeder(RowFeeder):
    """One descriptor a turn. ``leave_out`` by ticket makes it a faulty prefill node: "target" loses the first rows,
    "draft" all draft rows, "draft row" the last of them, "hidden" the first hidden rows."""

    busy = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turns = _TurnQueue()
        self._staging = StagingRing(num_buffers=2 * MOST_MESSAGES, num_bytes=4096)
        self._queue = self._turns  # type: ignore[assignment]
        self.leave_out: dict[str, str] = {}
        self.lost_target: set[str] = set()  # tickets that cannot become ready any more
        self.gathering = ""  # the ticket

    def _gather(self, ticket: str, block: RowBlock, slots: torch.Tensor, room: Room) -> bool:
        self.gathering = ticket
        return super()._gather(ticket, block, slots, room)

    def rows(self, ticket: str, block: RowBlock, slots: torch.Tensor) -> None:
        fault = self.leave_out.get(ticket)
        if fault == "target" and block.byte_class == TARGET_KV and ticket not in self.lost_target:
            self.lost_target.add(ticket)
            return
        if block.byte_class == DRAFT_KV and fault == "draft":
            return
        if block.byte_class == DRAFT_KV and fault == "draft row":
            block, slots = block.part(range(len(slots) - 1)), slots[:-1]
        super().rows(ticket, block, slots)

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        if self.leave_out.get(ticket) == "hidden":
            self.leave_out[ticket] = ""
            return
        super().hidden_rows(ticket, rows, first_token)

    def turn(self) -> bool:
        """False when nothing waits, no buffer is free, or the thread is in the midst of its work."""
        if self.busy or not self._turns.items or len(self._staging._free) < MOST_MESSAGES:
            return False
        self.busy, self._turns.turns = True, 1
        try:
            self._run()
        finally:
            self.busy = False
        return True
