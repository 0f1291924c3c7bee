"""Admission: how many sequences run, how many requests wait for their turn, and what the others are told.

Life of a place: entered -> queued -> running -> left, and left from any of them. Entered places are still being
tokenized and validated; they count as waiting, so that this too is bounded. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.routing.fair_queue import FairQueue, Waiting
from paceline.errors import NodeUnavailable, Overloaded, PacelineError

RETRY_AFTER_S = 1.0  # while the drain rate is not known
MAX_RETRY_AFTER_S = 60.0
DRAIN_WINDOW_S = 30.0  # the drain rate is that of the requests which ended in it
DRAIN_SAMPLES = 512
COMPETING_S = 60.0  # a tenant that asked within them competes with others
LOOK_MARGIN_S = 0.01  # past the end of that time, for clocks that tick apart
MAX_SEEN = 64  # tenants whose last request is remembered


@dataclass(frozen=True)
class TenantBounds:
    """What tenants may have of the whole. trusted: their names come from API keys. share: of the sequences that run and
    of the nodes' KV tokens, for one tenant while others ask too; 1: all."""

    trusted: bool = False
    share: float = 1.0


@dataclass
class _Running:
    """What a tenant has of the nodes."""

    slots: int = 0
    tokens: int = 0


@dataclass(eq=False)
class Place:
    """A request between ``enter`` and ``leave``."""

    slots: int  # sequences
    entered_at: float
    tenant: str = ""
    running: bool = False
    left: bool = False
    request: Waiting | None = None  # set while queued
    turn: asyncio.Future[None] | None = None


class Admission:
    """At most ``max_running`` sequences run and ``max_queued`` requests wait, each at most ``timeout_s`` seconds."""

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        bounds: TenantBounds = TenantBounds(),
        kv_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        """kv_tokens: those that the nodes hold together; 0: not known."""
        self._max_running, self._max_queued, self._timeout_s, self._clock = max_running, max_queued, timeout_s, clock
        self._bounds, self._kv_tokens = bounds, kv_tokens
        self._of_tenant: dict[str, _Running] = {}  # those with something that runs
        self._seen: OrderedDict[str, float] = OrderedDict()  # when tenants asked last, the latest at the end
        self._queue = FairQueue()
        self._places: dict[Waiting, Place] = {}  # queued ones
        self._ended: deque[float] = deque(maxlen=DRAIN_SAMPLES)  # when requests that ran were over
        self._draining = self._closed = False
        self._look_at: asyncio.TimerHandle | None = None  # whether who is kept back may run
        self.waiting = 0  # requests entered or queued
        self.running_slots = 0
        self.slots = 0  # sequences of all places

    def enter(self, slots: int, tenant: str = "") -> Place:
        """A place for a request of ``slots`` sequences. Raises Overloaded, and NodeUnavailable in a drain. A request
        alone always has one; in a full queue one of the tenant that has the most there gives way to a tenant that has
        fewer. Where names are clients' own words only what a tenant has beyond half of the queue gives way, or invented
        tenants would empty it."""
        if self._draining:
            raise NodeUnavailable("the router stops, and takes no new requests")
        self._note_seen(tenant)
        if self.slots and self.slots + slots > self._max_running and self.waiting >= self._max_queued:
            last = self._queue.last_of_most(tenant, 0 if self._bounds.trusted else self._max_queued // 2)
            if last is None:
                raise self._overloaded("no more are admitted")
            self._end(self._places[last], self._overloaded("another tenant's came"))
        self.waiting += 1
        self.slots += slots
        return Place(slots, self._clock(), tenant)

    def widen(self, place: Place, slots: int) -> None:
        """The request turns out to be of ``slots`` sequences. Before its turn. Raises Overloaded, as ``enter`` does."""
        others = self.slots - place.slots
        if others and others + slots > self._max_running and self.waiting > self._max_queued:
            raise self._overloaded("no more are admitted")
        self.slots += slots - place.slots
        place.slots = slots

    async def turn(self, place: Place, tenant: str, priority: int, tokens: int) -> None:
        """Wait until the request may run. tokens: of prompt and output, all choices. Raises Overloaded when its turn
        does not come in time, NodeUnavailable when the router stops."""
        if self._closed:
            raise NodeUnavailable("the router stops")
        place.request = Waiting(tenant, priority, tokens, place.slots)
        place.turn = asyncio.get_running_loop().create_future()
        self._queue.push(place.request)
        self._places[place.request] = place
        self._start_next()
        if place.running:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(place.turn)
        except TimeoutError:
            if place.running:  # its turn came with the end of the wait
                return
            raise self._overloaded(f"the turn did not come within {self._timeout_s:g} s") from None

    def leave(self, place: Place) -> None:
        """The request is over, wherever it was. Idempotent."""
        if place.left:
            return
        place.left = True
        self.slots -= place.slots
        if place.running:
            self.running_slots -= place.slots
            self._count_running(place, -1)
            self._ended.append(self._clock())
        else:
            self.waiting -= 1
            self._unqueue(place)
        self._start_next()

    def retry_after_s(self) -> float:
        """Seconds until the requests that wait now will have gone, at the rate at which requests ended lately."""
        now = self._clock()
        while self._ended and self._ended[0] < now - DRAIN_WINDOW_S:
            self._ended.popleft()
        if len(self._ended) < 2:
            return RETRY_AFTER_S
        rate = len(self._ended) / max(now - self._ended[0], 0.1)
        return min((self.waiting + 1) / rate, MAX_RETRY_AFTER_S)

    def drain(self) -> None:
        """Take no new requests. Those that run or wait go on."""
        self._draining = True

    def close(self) -> None:
        """End every wait. Idempotent."""
        self._closed = True
        if self._look_at is not None:
            self._look_at.cancel()
        for place in list(self._places.values()):
            self._end(place, NodeUnavailable("the router stops"))

    def _overloaded(self, why: str) -> Overloaded:
        text = f"{self.running_slots} sequences run and {self.waiting} requests wait: {why}"
        return Overloaded(text, self.retry_after_s())

    def _end(self, place: Place, error: PacelineError) -> None:
        """End the wait of a queued place; its owner leaves it when it is told."""
        self._unqueue(place)
        assert place.turn is not None
        if not place.turn.done():
            place.turn.set_exception(error)

    def _unqueue(self, place: Place) -> None:
        if place.request is not None and self._places.pop(place.request, None) is not None:
            self._queue.remove(place.request)

    def _start_next(self) -> None:
        """Let run who is next while it fits. Who is next and does not fit is waited for, or it would starve."""
        while (request := self._queue.peek(self._has_its_share if self._bounds.share < 1.0 else None)) is not None:
            if self.running_slots and self.running_slots + request.slots > self._max_running:
                return
            self._queue.take(request)
            place = self._places.pop(request)
            place.running = True
            self.waiting -= 1
            self.running_slots += place.slots
            self._count_running(place, 1)
            assert place.turn is not None
            place.turn.set_result(None)

    def _count_running(self, place: Place, sign: int) -> None:
        if self._bounds.share == 1.0:
            return
        assert place.request is not None
        has = self._of_tenant.setdefault(place.tenant, _Running())
        has.slots += sign * place.slots
        has.tokens += sign * place.request.cost
        if not has.slots:
            del self._of_tenant[place.tenant]

    def _has_its_share(self, request: Waiting) -> bool:
        """Whether the request would bring its tenant above its share while others ask too. One that runs nothing may
        always begin."""
        has = self._of_tenant.get(request.tenant)
        if has is None or not self._others_ask(request.tenant):
            return False
        share, kv_tokens = self._bounds.share, self._kv_tokens()
        too_many = has.slots + request.slots > share * self._max_running
        return too_many or (bool(kv_tokens) and has.tokens + request.cost > share * kv_tokens)

    def _others_ask(self, tenant: str) -> bool:
        """Whether another tenant asked lately, or has something that runs or waits."""
        latest = next((name for name in reversed(self._seen) if name != tenant), None)
        if latest is not None and (left_s := self._seen[latest] + COMPETING_S - self._clock()) >= 0:
            if self._look_at is None:  # nothing else may happen by then
                self._look_at = asyncio.get_running_loop().call_later(left_s + LOOK_MARGIN_S, self._look)
            return True
        return any(name != tenant for name in self._of_tenant)

    def _look(self) -> None:
        self._look_at = None
        self._start_next()

    def _note_seen(self, tenant: str) -> None:
        if self._bounds.share == 1.0:
            return
        self._seen.pop(tenant, None)
        self._seen[tenant] = self._clock()
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
