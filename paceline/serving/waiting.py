"""A bounded first-come-first-served line of requests that wait for room, each with a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from paceline.errors import Overloaded


class Waiter(Protocol):
    """Something that waits. ``deadline`` is on the monotonic clock, in seconds."""

    @property
    def deadline(self) -> float: ...


W = TypeVar("W", bound=Waiter)


class WaitingLine(Generic[W]):
    """Only the head may be let in: a long prompt that waits for pages is not overtaken for ever by short ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line: deque[W] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, waiter: W) -> bool:
        return waiter in self._line

    def add(self, waiter: W) -> None:
        """Join at the end; raises Overloaded when the line is full."""
        if len(self._line) >= self._limit:
            raise Overloaded(f"{self._limit} requests are waiting on this node already")
        self._line.append(waiter)

    def admit(self, start: Callable[[W], bool]) -> list[tuple[W, Exception]]:
        """Let waiters in from the head until ``start`` says there is no room.

        A waiter whose ``start`` raises leaves the line and is returned with its error.
        """
        failed: list[tuple[W, Exception]] = []
        while self._line:
            try:
                if not start(self._line[0]):
                    break
            except Exception as error:
                failed.append((self._line[0], error))
            self._line.popleft()
        return failed

    def expire(self, now: float) -> list[W]:
        """Take out and return the waiters whose deadline has passed."""
        late = [waiter for waiter in self._line if waiter.deadline <= now]
        for waiter in late:
            self._line.remove(waiter)
        return late

    def discard(self, waiter: W) -> bool:
        """Take ``waiter`` out; False when it was not in line."""
        if waiter not in self._line:
            return False
        self._line.remove(waiter)
        return True
