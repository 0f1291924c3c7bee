"""What happened to a request in this process, and when: the events behind ``paceline trace``.

A ``Recorder`` keeps the latest sequences and of each its first ``MAX_EVENTS`` events; further ones are counted. Whoever
serves a sequence ``open``s a ``Trace`` and records on it from any thread; an event costs about a microsecond. Times are
of the monotonic clock while they are kept, and Unix time when they are read: the processes of one host, read together,
line up to well under a millisecond, hosts as well as their clocks do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.results import RequestTrace, TraceEvent

MAX_EVENTS = 2_000  # of one sequence in one process
MAX_TOLD_EVENTS = 4 * MAX_EVENTS  # of one request, which may have many sequences
MAX_TOTAL_EVENTS = 100_000  # of one process, as of the moment a sequence is opened: the oldest give way
MAX_TEXT = 300  # characters of an attribute

T = TypeVar("T")
_Raw = tuple[str, int, str, float, float | None, dict[str, str | float]]


@dataclass
class _Kept:
    """Events of one sequence. Appending is atomic; ``dropped`` is not, so it has the lock."""

    events: list[_Raw] = field(default_factory=list)
    dropped: int = 0
    attempts: dict[str, int] = field(default_factory=dict)  # by track
    lock: threading.Lock = field(default_factory=threading.Lock)


class Trace:
    """Where one attempt at a sequence is recorded, on one track: a row of the timeline."""

    __slots__ = ("_attempt", "_kept", "_track")

    def __init__(self, kept: _Kept, track: str, attempt: int) -> None:
        self._kept, self._track, self._attempt = kept, track, attempt

    def record(
        self, name: str, start_s: float | None = None, end_s: float | None = None, **attributes: str | float
    ) -> None:
        """An event at ``start_s`` (monotonic clock; None: now), or a span when it has an end. Spans of one track must
        nest or be apart. Never blocks, never raises."""
        kept = self._kept
        if len(kept.events) >= MAX_EVENTS:
            with kept.lock:
                kept.dropped += 1
            return
        at = time.monotonic() if start_s is None else start_s
        kept.events.append((self._track, self._attempt, name, at, end_s, attributes))

    def on(self, track: str) -> Trace:
        """The same attempt on another track."""
        return Trace(self._kept, track, self._attempt)


class _Off(Trace):
    """Records nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_Kept(), "", 0)

    def record(
        self, name: str, start_s: float | None = None, end_s: float | None = None, **attributes: str | float
    ) -> None:
        """Nothing."""

    def on(self, track: str) -> Trace:
        """Itself."""
        return self


NO_TRACE: Trace = _Off()


class Recorder:
    """The traces of one process. ``num_requests``: sequences kept (each choice of a request is one); 0 keeps none."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()  # by sequence and owner, oldest first
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(1, "traces")

    def open(self, request_id: str, track: str, owner: str = "") -> Trace:
        """A trace of the sequence ``request_id``; opened again on the same track it is its next attempt. owner: whose
        it is; another one's sequence of that id is another sequence."""
        if self.num_requests == 0:
            return NO_TRACE
        with self._lock:
            kept = self._kept.setdefault((request_id, owner), _Kept())
            self._kept.move_to_end((request_id, owner))
            self._evict()
            attempt = kept.attempts[track] = kept.attempts.get(track, 0) + 1
        return Trace(kept, track, attempt)

    def read(self, request_id: str, node: str, owner: str | None = None) -> RequestTrace:
        """All choices of a request, in order of start, as events of ``node``; without events when nothing is kept.
        owner: only what is theirs; None: of each sequence what was opened last, whoever's it is."""
        with self._lock:
            found = {
                key: kept
                for (key, whose), kept in self._kept.items()
                if _is_of(key, request_id) and owner in (None, whose)
            }
        unix = time.time() - time.monotonic()
        raws = [(key, raw) for key, kept in found.items() for raw in list(kept.events)]
        raws.sort(key=lambda pair: pair[1][3])
        events = tuple(_event(node, key, raw, unix) for key, raw in raws[:MAX_TOLD_EVENTS])
        dropped = sum(kept.dropped for kept in found.values()) + len(raws) - len(events)
        return RequestTrace(request_id, events, dropped=dropped)

    async def beside_the_loop(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. It reads traces in the one thread that does: the thousands of events of a long one, or
        many that are asked for at once, hold no stream up."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _evict(self) -> None:
        """The newest stays, whatever it is."""
        total = sum(len(kept.events) for kept in self._kept.values())
        while len(self._kept) > self.num_requests or (total > MAX_TOTAL_EVENTS and len(self._kept) > 1):
            total -= len(self._kept.popitem(last=False)[1].events)


def _is_of(key: str, request_id: str) -> bool:
    """Choice i of several is the sequence ``request_id#i``."""
    rest = key.removeprefix(request_id)
    return key == request_id or (len(rest) < len(key) and rest[0] == "#" and rest[1:].isdecimal())


def _event(node: str, key: str, raw: _Raw, unix: float) -> TraceEvent:
    track, attempt, name, start, end, given = raw
    attributes = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in given.items()}
    return TraceEvent(node, track, key, attempt, name, start + unix, None if end is None else end + unix, attributes)
