"""Whether a client reads what is made for it: one that does not must not hold the nodes' pages for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CREDIT_S = 0.25  # that a chunk taken gives back: the least rate is four chunks a second while as many wait
LOOK_S = 0.5  # from one look at a queue to the next
WANTED = 5.0  # that a second counts in which others wait for the nodes


class ChunkQueue(asyncio.Queue[Any]):
    """What a request's reader is to get: chunks, then its end or an error. The error that came first is the one it is
    told."""

    _ended = False

    def end(self, error: Exception) -> None:
        """The reader is told ``error``, after the chunks that there is room for."""
        if self._ended:
            return
        self._ended = True
        if self.full():
            self.get_nowait()
        self.put_nowait(error)


class Reading:
    """Adds up the seconds in which the reader kept a full queue waiting; one in which somebody else waits for what it
    holds counts ``WANTED``. At ``limit_s`` it calls ``too_slow``, once."""

    def __init__(self, limit_s: float, others_wait: Callable[[], bool], too_slow: Callable[[], None]) -> None:
        self._limit_s, self._others_wait, self._too_slow = limit_s, others_wait, too_slow
        self._waited_s = 0.0

    @contextmanager
    def of(self, queue: asyncio.Queue[Any]) -> Iterator[None]:
        """Around the time in which the reader has a chunk and does not ask for the next."""
        self._since = time.monotonic()
        self._look_later(queue)
        try:
            yield
        finally:
            self._timer.cancel()
            self._waited_s = max(0.0, self._waited_s + self._counted(queue, CREDIT_S))

    def _look_later(self, queue: asyncio.Queue[Any]) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(self._limit_s, LOOK_S), self._look, queue)

    def _look(self, queue: asyncio.Queue[Any]) -> None:
        self._waited_s += self._counted(queue)
        if self._waited_s >= self._limit_s:
            self._too_slow()
        else:
            self._look_later(queue)

    def _counted(self, queue: asyncio.Queue[Any], less_s: float = 0.0) -> float:
        """Seconds since the last look, if the queue is full, and ``less_s`` fewer."""
        since, self._since = self._since, time.monotonic()
        full_s = self._since - since if queue.full() else 0.0
        return (full_s - less_s) * (WANTED if self._others_wait() else 1.0)
