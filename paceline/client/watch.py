"""Whether a router that a stream hears nothing from still lives.

A stopped process and a cut cable close no connection. gRPC's pings find them after 1.5 to 2.5 s: a ping may only follow
the last one by a second, and what a cut-off router still sends puts the next one off. So a stream that waits for
``SILENT_S`` asks its router's health service on the same connection, unless the router told another stream something
meanwhile. A router that does not answer in time is left, and one that tells any stream of the client anything at all is
not. A stream that left one for its silence grants the next one twice the time for a while, whatever other streams
grant it: a machine that is too busy to answer gets no more work from it for long.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

SILENT_S = 0.4  # that a stream waits before it asks
ANSWER_S = 0.7  # for the first answer
DOUBLINGS = 3  # of that time, at most
CALM_S = 5.0  # at one router, after which nothing is doubled any more
LOOK_S = 0.1  # between two looks at the streams of a blocking client, and after a question
JOIN_TIMEOUT_S = 1.0
HEALTH = "/grpc.health.v1.Health/Check"  # its empty request asks for the server as a whole; it needs no API key
NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Silent(grpc.RpcError):
    """What a call to a router that answers nothing is taken to have failed with."""

    def code(self) -> grpc.StatusCode:
        """As of a connection that broke."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """For people."""
        return "the router is silent and does not answer"

    def trailing_metadata(self) -> tuple[()]:
        """None came."""
        return ()


@dataclass(eq=False)
class Place:
    """Where a stream is, and since when it waits there. The stream owns it; its watch only looks at it."""

    router: int = 0
    call: Any = None
    since: float | None = None  # monotonic clock; None while it does not wait for a chunk
    silent: bool = False  # its router was found to be
    left: int = 0  # how often that was so, one soon after the other
    entered_at: float = 0.0
    over: bool = False  # nothing is to come any more

    def enter(self, router: int, call: Any) -> None:
        """Go on at a router."""
        self.router, self.call, self.silent, self.entered_at = router, call, False, time.monotonic()

    def leave(self) -> None:
        """Its router does not live: what waits fails."""
        self.silent, self.left = True, self._left_lately + 1
        self.call.cancel()

    @property
    def answer_s(self) -> float:
        """How long its router has to answer."""
        return float(ANSWER_S * 2 ** min(self._left_lately, DOUBLINGS))

    @property
    def _left_lately(self) -> int:
        return self.left if time.monotonic() - self.entered_at < CALM_S else 0


class _Signs:
    """When each router last showed that it lives."""

    def __init__(self, num_routers: int) -> None:
        self._heard_at = [-math.inf] * num_routers

    def heard(self, router: int) -> None:
        """Something came from a router: a chunk of any stream, or an answer."""
        self._heard_at[router] = time.monotonic()

    def _quiet_s(self, place: Place) -> float:
        """How long a stream has waited, and its router has shown nothing to any other."""
        since = place.since
        return 0.0 if since is None else time.monotonic() - max(since, self._heard_at[place.router])

    def _unanswered(self, place: Place, router: int, began_at: float) -> bool:
        """Whether the failure of a question of that time says that a stream's router is silent: not where the stream
        waits elsewhere or began to later, nor where something came meanwhile."""
        since = place.since
        return place.router == router and since is not None and max(since, self._heard_at[router]) < began_at


@dataclass(frozen=True)
class _Asked:
    """A question of an asyncio client."""

    began_at: float
    lives: asyncio.Task[bool]


class AsyncWatch(_Signs):
    """Watches the streams of an asyncio client. Those that look at the same router, and grant it the same time, share a
    question."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        super().__init__(len(channels))
        self._channels = channels
        self._asked: dict[tuple[int, float], _Asked] = {}  # by router and time granted
        self._watched: set[asyncio.Task[None]] = set()

    def add(self, place: Place) -> None:
        """Watch a stream until it is over, or nobody has it any more. A single router has no other to go to."""
        if len(self._channels) > 1:
            task = asyncio.get_running_loop().create_task(self._watch(weakref.ref(place)))
            self._watched.add(task)
            task.add_done_callback(self._watched.discard)

    async def _watch(self, ref: weakref.ref[Place]) -> None:
        pause_s: float | None = SILENT_S
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._look(ref)

    async def _look(self, ref: weakref.ref[Place]) -> float | None:
        """Ask when it is time. Returns seconds to the next look; None when there is none."""
        place = ref()
        if place is None or place.over:
            return None
        quiet_s, router = self._quiet_s(place), place.router
        if quiet_s < SILENT_S:
            return SILENT_S - quiet_s
        asked = self._ask(router, place.answer_s)
        del place  # which may be dropped meanwhile
        lives = await asyncio.shield(asked.lives)
        place = ref()
        if place is not None and not lives and self._unanswered(place, router, asked.began_at):
            place.leave()
        return LOOK_S

    def _ask(self, router: int, answer_s: float) -> _Asked:
        asked = self._asked.get((router, answer_s))
        if asked is None or asked.lives.done():
            lives = asyncio.create_task(self._lives(router, answer_s))
            asked = self._asked[router, answer_s] = _Asked(time.monotonic(), lives)
            self._channels[(router + 1) % len(self._channels)].get_state(try_to_connect=True)  # it may be needed soon
        return asked

    async def _lives(self, router: int, answer_s: float) -> bool:
        try:
            ask: Any = self._channels[router].unary_unary(HEALTH)
            await ask(b"", timeout=answer_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in NO_ANSWER:
                return False
        self.heard(router)
        return True

    async def close(self) -> None:
        """Watch no more. Idempotent."""
        tasks = [*self._watched, *(asked.lives for asked in self._asked.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Watch(_Signs):
    """Watches the streams of a blocking client, from a thread that runs while there are any."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        super().__init__(len(channels))
        self._channels = channels
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, place: Place) -> None:
        """Watch a stream until it is over, or nobody has it any more. A single router has no other to go to."""
        if len(self._channels) < 2:
            return
        with self._lock:
            self._places.add(place)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        asked: dict[tuple[int, float], _Question] = {}  # calls in progress, by router and time granted
        while not self._closed.wait(LOOK_S):
            with self._lock:
                places = [place for place in self._places if not place.over]
                if not places:
                    self._thread = None
                    return
            self._look(places, asked)
            del places  # which may be dropped until the next look

    def _look(self, places: list[Place], asked: dict[tuple[int, float], _Question]) -> None:
        """Ask the routers of streams that wait for long, and tell streams what became of earlier questions."""
        for router, answer_s in [key for key, question in asked.items() if question.done()]:
            question = asked.pop((router, answer_s))
            if question.code() not in NO_ANSWER:
                self.heard(router)
                continue
            for place in places:
                if place.answer_s <= answer_s and self._unanswered(place, router, question.began_at):
                    place.leave()
        for place in places:
            key = place.router, place.answer_s
            if key not in asked and self._quiet_s(place) >= SILENT_S:
                asked[key] = _Question(self._channels[place.router], place.answer_s)

    def close(self) -> None:
        """Watch no more; call it before the channels are closed. Idempotent."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_TIMEOUT_S)


class _Question:
    def __init__(self, channel: grpc.Channel, answer_s: float) -> None:
        self.began_at = time.monotonic()
        ask: Any = channel.unary_unary(HEALTH)
        call = ask.future(b"", timeout=answer_s)
        self.done, self.code = call.done, call.code
