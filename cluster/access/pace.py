"""How fast one caller may cause work before it is known what it brings: refusals, and reading large bodies."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 1024  # that are remembered


class Pace:
    """``per_s`` a second for each caller, of which ``at_once`` may come at once. Who is faster waits, in turn."""

    def __init__(
        self, per_s: float, at_once: float, longest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """longest_s: nobody waits longer. clock: seconds, monotonic."""
        self._per_s, self._ahead_s, self._longest_s, self._clock = per_s, at_once / per_s, longest_s, clock
        self._done_at: OrderedDict[str, float] = OrderedDict()  # when what a caller asked for is worked off

    def wait_s(self, caller: str, amount: float = 1.0) -> float:
        """Counts ``amount`` for a caller; the seconds that it is to wait."""
        now = self._clock()
        done_at = max(now, self._done_at.pop(caller, now)) + amount / self._per_s
        wait_s = min(max(0.0, done_at - now - self._ahead_s), self._longest_s)
        self._done_at[caller] = min(done_at, now + self._ahead_s + self._longest_s)
        if len(self._done_at) > MAX_CALLERS:
            self._done_at.popitem(last=False)
        return wait_s

    async def take(self, caller: str, amount: float = 1.0) -> None:
        """Wait for as long."""
        wait_s = self.wait_s(caller, amount)
        if wait_s:
            await asyncio.sleep(wait_s)
