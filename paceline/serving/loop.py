"""The engine thread: the only thread that touches a runner, its allocator and its page tables.

Other threads hand it work with ``post`` (fire and forget) or ``call`` (awaitable). Between two steps it runs what
was posted, so whatever a posted function changes is seen at a step boundary and never in the middle of a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from paceline.serving.cores import CoreShare

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_TICK_S = 0.1  # an idle engine looks again this often even when nobody wakes it
STALL_S = 60.0  # a step that takes longer than this counts as hung
ERROR_PAUSE_S = 0.05  # after a step that raised, so that a broken step cannot spin


class EngineLoop:
    """Runs ``step`` on one thread for as long as it says there was work, else sleeps until woken.

    The inbox has no limit of its own: every entry belongs to an RPC in flight or to a page holder, and both are
    limited by the node (concurrent RPCs, queue lengths, pages).
    """

    def __init__(self, name: str, step: Callable[[], bool], cores: CoreShare | None = None) -> None:
        """cores: told when there is work; None where cores are not shared."""
        self._step = step
        self._cores = cores
        self._inbox: deque[tuple[Callable[[], None], Callable[[Exception], None] | None]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._woken = False
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, work: Callable[[], None], failed: Callable[[Exception], None] | None = None) -> None:
        """Run ``work`` on the engine thread before its next step. From any thread.

        failed: called there when ``work`` raises, to end what it was about: nobody else knows.
        """
        with self._condition:
            self._inbox.append((work, failed))
            self._condition.notify()

    def wake(self) -> None:
        """Make an idle engine look again. From any thread."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the engine thread and await its result or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(result: T | None, error: Exception | None) -> None:
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            notify(loop, resolve, result, error)

        self.post(run)
        return await future

    def stop(self, timeout_s: float) -> bool:
        """Finish the step in progress and end the thread. False when it did not end in time. Blocks."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def alive(self) -> bool:
        """The thread runs and is not stuck in a step."""
        return self._thread.is_alive() and time.monotonic() - self._beat < STALL_S

    def _run(self) -> None:
        while not self._stopping:
            self._beat = time.monotonic()
            self._woken = False
            self._say_busy(True)
            try:
                self._run_inbox()
                worked = self._run_step()
            except Exception:
                log.exception("engine step failed outside of any sequence; the engine goes on")
                time.sleep(ERROR_PAUSE_S)
                continue
            if not worked:
                self._say_busy(False)
                with self._condition:
                    if not (self._inbox or self._stopping or self._woken):
                        self._condition.wait(IDLE_TICK_S)
        self._run_inbox()  # releases that were posted last

    def _run_step(self) -> bool:
        if self._cores is None:
            return self._step()
        with self._cores.step():
            return self._step()

    def _say_busy(self, busy: bool) -> None:
        if self._cores is not None:
            self._cores.busy = busy

    def _run_inbox(self) -> None:
        while True:
            with self._condition:
                if not self._inbox:
                    return
                work, failed = self._inbox.popleft()
            try:
                work()
            except Exception as error:
                log.exception("a posted call failed; the engine goes on")
                if failed is not None:
                    _tell(failed, error)


def _tell(failed: Callable[[Exception], None], error: Exception) -> None:
    try:
        failed(error)
    except Exception:
        log.exception("ending what a posted call was about failed; the engine goes on")


class _Callback(Protocol):
    def __call__(self, *args: object) -> None: ...


def notify(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """``call_soon_threadsafe``, harmless once the event loop has closed (then nobody is left to tell)."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        log.debug("event loop is closed; notification dropped")


async def every(period_s: float, work: Callable[[], Awaitable[None] | None]) -> None:
    """Run ``work`` every ``period_s`` seconds until cancelled; one failure does not end the timer."""
    while True:
        await asyncio.sleep(period_s)
        try:
            result = work()
            if result is not None:
                await result
        except Exception:
            log.exception("timer tick failed; the timer goes on")
