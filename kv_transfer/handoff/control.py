"""What the receiver thread of a link is to do next."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from kv_transfer.transports.base import TransportError
from paceline.errors import Overloaded
from paceline.v1.handoff_pb2 import HandoffMessage

MAX_QUEUED_MESSAGES = 4096

Work = HandoffMessage | tuple[str, str]  # a control message, or a ticket to fail and why


class ControlQueue:
    """Control messages in order, and before them the tickets to fail. Produced by the control stream, the engine and
    the timer, from any thread; consumed by the receiver thread."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._messages: deque[HandoffMessage] = deque()
        self._to_fail: deque[tuple[str, str]] = deque()  # at most one or two a ticket in flight
        self.closed: str | None = None  # why the link is dead

    def put(self, message: HandoffMessage) -> None:
        """Queue a control message. TransportError when the link is dead, Overloaded when 4096 wait."""
        with self._cond:
            if self.closed is not None:
                raise TransportError(f"link is dead: {self.closed}")
            if len(self._messages) >= MAX_QUEUED_MESSAGES:
                raise Overloaded(f"{MAX_QUEUED_MESSAGES} control messages wait on one link")
            self._messages.append(message)
            self._cond.notify_all()

    def fail(self, ticket: str, reason: str) -> None:
        """Queue a ticket to fail; on a dead link all of them fail anyway."""
        with self._cond:
            if self.closed is None:
                self._to_fail.append((ticket, reason))
                self._cond.notify_all()

    def close(self, reason: str) -> bool:
        """The link is dead: drop the messages. False when it was dead already."""
        with self._cond:
            if self.closed is not None:
                return False
            self.closed = reason
            self._messages.clear()
            self._cond.notify_all()
            return True

    def next(self) -> Work | None:
        """What to do now; waits for something. None: the link is dead."""
        with self._cond:
            while not self.waiting and self.closed is None:
                self._cond.wait()
            if self._to_fail:
                return self._to_fail.popleft()
            return self._messages.popleft() if self.closed is None else None

    def next_to_fail(self) -> tuple[str, str] | None:
        """A ticket to fail, if there is one."""
        with self._cond:
            return self._to_fail.popleft() if self._to_fail else None

    @property
    def waiting(self) -> bool:
        """`next` would not wait, on a live link."""
        return bool(self._messages or self._to_fail)

    def announced(self, most: int) -> list[HandoffMessage]:
        """The next ``most`` control messages: what they announce follows, whatever becomes of their tickets."""
        with self._cond:
            return list(islice(self._messages, most))
