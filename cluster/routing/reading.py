"""Whether a client reads what is made for it: one that does not must not hold the nodes' pages for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CREDIT_S = 0.25  # that a chunk taken gives back: the least rate is four chunks a second while as many wait


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
    """Adds up the seconds in which the reader kept a full queue waiting. At ``limit_s`` it calls ``too_slow``, once."""

    def __init__(self, limit_s: float, too_slow: Callable[[], None]) -> None:
        self._limit_s, self._too_slow = limit_s, too_slow
        self._waited_s = 0.0

    @contextmanager
    def of(self, queue: asyncio.Queue[Any]) -> Iterator[None]:
        """Around the time in which the reader has a chunk and does not ask for the next."""
        since = time.monotonic()
        timer = asyncio.get_running_loop().call_later(self._limit_s - self._waited_s, self._check, queue, since)
        try:
            yield
        finally:
            timer.cancel()
            full_s = time.monotonic() - since if queue.full() else 0.0
            self._waited_s = max(0.0, self._waited_s + full_s - CREDIT_S)

    def _check(self, queue: asyncio.Queue[Any], since: float) -> None:
        if queue.full():
            self._too_slow()
