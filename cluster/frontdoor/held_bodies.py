"""Bytes of requests that are held before they are answered: bounded for all, and for each owner, and so is how fast an
owner's HTTP bodies are read. HTTP and gRPC have one budget together.

A small body is always let in: there are no more of them than connections and calls. So a client with large bodies keeps
no other one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from cluster.access.pace import Pace
from paceline.errors import Overloaded

MAX_HELD_BYTES = 256 * 2**20  # of all bodies and messages above SMALL_BYTES
OWNER_SHARE = 0.5  # of it, for one tenant, or one address where there are no keys
SMALL_BYTES = 32 * 1024
READ_PER_S = 16 * 2**20  # of one owner's bodies beyond SMALL_BYTES
READ_AT_ONCE = 16 * 2**20
PAUSE_S = 2.0  # longest wait before a further part of a body; who would wait longer is refused


class Budget:
    """So much for all, of which an owner has ``OWNER_SHARE`` at most."""

    def __init__(self, most: int, full: str) -> None:
        """full: what is said when nothing is left."""
        self._most, self._full = most, full
        self._of: Counter[str] = Counter()
        self.total = 0

    def take(self, owner: str, size: int) -> None:
        """``size`` more. Raises Overloaded."""
        of_owner = self._of[owner] + size
        if self.total + size > self._most or of_owner > self._most * OWNER_SHARE:
            raise Overloaded(self._full)
        self.total += size
        self._of[owner] = of_owner

    def give(self, owner: str, size: int) -> None:
        """They are held no more."""
        self.total -= size
        self._of[owner] -= size
        if not self._of[owner]:
            del self._of[owner]

    @contextmanager
    def taken(self, owner: str, size: int) -> Iterator[None]:
        """``take`` and ``give``."""
        self.take(owner, size)
        try:
            yield
        finally:
            self.give(owner, size)


class HeldBodies(Budget):
    """Bytes of bodies and messages."""

    def __init__(self, most: int = MAX_HELD_BYTES) -> None:
        super().__init__(most, "too many bytes of requests are held here")
        self.parser = ThreadPoolExecutor(1, "bodies")  # parses large ones, one after the other
        self.pace = Pace(READ_PER_S, READ_AT_ONCE, PAUSE_S)


class HeldBody:
    """One body. ``release`` it."""

    def __init__(self, bodies: HeldBodies, owner: str) -> None:
        self._bodies, self.owner = bodies, owner
        self._taken = 0

    def grow(self, size: int) -> None:
        """It has ``size`` bytes now. Raises Overloaded."""
        if size > SMALL_BYTES:
            self._bodies.take(self.owner, size - self._taken)
            self._taken = size

    def pause_s(self, size: int, part: int) -> float:
        """How long to wait before more of it is read. size, part: bytes that came in all, and last."""
        return self._bodies.pace.wait_s(self.owner, part) if size > SMALL_BYTES else 0.0

    def release(self) -> None:
        """Idempotent."""
        if self._taken:
            self._bodies.give(self.owner, self._taken)
            self._taken = 0
