"""What a process has started, to be ended in reverse; and what it is waiting for meanwhile."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from paceline.phases import phase

log = logging.getLogger(__name__)

Tell = Callable[[str, str], None]  # (what is waited for, details)


class Parts:
    """The parts of one process."""

    def __init__(self, tell: Tell | None = None) -> None:
        """tell: called with what the start is waiting for."""
        self.tell = tell
        self.grace_s = 0.0  # what runs may go on for so long when it is ended
        self._ends = AsyncExitStack()

    def at_end(self, name: str, end: Callable[[], object]) -> None:
        """``close`` calls ``end`` before those of all parts that were started earlier; it may return an awaitable."""

        async def stop() -> None:
            try:
                ended = end()
                if inspect.isawaitable(ended):
                    await ended
            except Exception:  # one part that fails to stop must not keep the others running
                log.exception("stopping %s failed", name)

        self._ends.push_async_callback(stop)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Tell what is waited for within."""
        if self.tell is not None:
            self.tell(what, "")
        with phase(what):
            yield

    async def bring_up(self, start: Awaitable[None]) -> None:
        """Await ``start``. On failure nothing is left running."""
        try:
            await start
        except BaseException:
            await self.close(grace_s=0)
            raise

    async def close(self, grace_s: float) -> None:
        """End everything, newest first; each part has its own deadline. Idempotent."""
        self.grace_s = grace_s
        await self._ends.aclose()
