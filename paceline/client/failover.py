"""Several routers behind one client: which is in use, and how long a call that failed is worth another try."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from paceline.errors import NodeUnavailable, PacelineError
from paceline.rpc.wire_errors import RETRY_AFTER_KEY, TOLD_KEY, error_from_rpc

DEFAULT_RETRIES = 8
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SPREAD = 0.5  # of a pause: how much of it chance decides
LIVED_S = 2.5  # a call that broke after so long had reached a router: an attempt to connect takes 2 s at most

BUDGET = 10.0  # of a client: refused retries that use it up; with half of it left none is made any more
GIVEN_BACK = 0.1  # by a call that is answered

# What a router that dies or stops leaves behind; a client that cancels by itself does not ask.
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

C = TypeVar("C")
_RNG = random.Random()  # its own, so that a program that seeds the module's has no clients in step


class Routers(Generic[C]):
    """A channel and a stub for each address. The one in use stays so, for every call, until it fails one."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        connect: Callable[[str], C],
        stub: Callable[[C], Any],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """metadata: sent with every call. ValueError when there is no address."""
        listed = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not listed:
            raise ValueError("at least one address is needed")
        self.addresses, self.metadata = listed, metadata
        self.channels = [connect(address) for address in listed]
        self._stubs = [stub(channel) for channel in self.channels]
        self._current = 0
        self.budget = RetryBudget()

    def __len__(self) -> int:
        return len(self.channels)

    @property
    def current(self) -> tuple[int, Any]:
        """Number and stub of the router in use."""
        index = self._current
        return index, self._stubs[index]

    def failed(self, index: int) -> None:
        """Use the next one, unless another call has moved on already."""
        if index == self._current:
            self._current = (index + 1) % len(self)


class RetryBudget:
    """How often a client's calls, all together, ask again after a router refused them. As in gRPC's throttling of
    retries, a retry that is refused too costs 1, a call that is answered gives back GIVEN_BACK, and nothing is asked
    again while half is gone: routers that have too much to do already get at most a tenth more.

    A first try costs nothing. A router that drains refuses many at once, and the next one takes them all.
    """

    def __init__(self) -> None:
        self._left, self._lock = BUDGET, threading.Lock()

    def answered(self) -> None:
        """A router took a call."""
        with self._lock:
            self._left = min(BUDGET, self._left + GIVEN_BACK)

    def refused(self, *, retry: bool) -> bool:
        """A router refused a call, or a ``retry`` of it. Returns whether it may be asked for again."""
        with self._lock:
            self._left = max(0.0, self._left - retry)
            return self._left > BUDGET / 2


class Patience:
    """Tries in a row without a new chunk, and the time that is left. Before the first chunk each router is asked once,
    as a call without stream would; after it, and after a call that broke while a router worked on it, ``retries``
    bounds the tries, with pauses once each router was asked. What a router refused before is asked again within the
    client's budget alone; a stream that is under way, and what a lost connection took along, is not counted there."""

    def __init__(
        self,
        routers: int,
        retries: int,
        timeout_s: float,
        rng: random.Random | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        """rng: spreads the pauses, so that the clients of a router that was lost do not come back all at once. budget:
        of the client; None: one of its own."""
        self._routers, self._retries = routers, retries
        self._rng = _RNG if rng is None else rng
        self._deadline = time.monotonic() + timeout_s
        self._failures, self._asked_at = 0, time.monotonic()
        self._budget, self._answered = RetryBudget() if budget is None else budget, False

    @property
    def left_s(self) -> float:
        """Seconds to the deadline of the whole call."""
        return max(0.0, self._deadline - time.monotonic())

    def progressed(self) -> None:
        """An answer came, or a chunk of it."""
        self._failures = 0
        if not self._answered:
            self._answered = True
            self._budget.answered()

    def pause_s(self, error: Any, *, started: bool) -> float:
        """How long to wait before the next try after a call's ``grpc.RpcError``. Raises PacelineError when there is no
        use in one."""
        code = error.code()
        refused = code is grpc.StatusCode.RESOURCE_EXHAUSTED and (started or self._failures > 0)
        if not started and _is_refusal(error) and not self._budget.refused(retry=self._failures > 0):
            raise lost_error(error)
        self._failures += 1
        allowed = self._retries if started or self._broke_at_work(error) else self._routers - 1
        if (code not in LOST and not refused) or self._failures > allowed:
            raise lost_error(error, resuming=started)
        rounds = self._failures - self._routers  # 0: every router was asked
        pause = min(FIRST_PAUSE_S * 2.0**rounds, LONGEST_PAUSE_S) if rounds >= 0 else 0.0
        pause *= self._rng.uniform(1.0 - SPREAD, 1.0)
        if refused:  # not before the router says
            pause = max(pause, min(_retry_after_s(error), LONGEST_PAUSE_S) * self._rng.uniform(1.0, 1.0 + SPREAD))
        if pause >= self.left_s:
            raise lost_error(error, resuming=started)
        self._asked_at = time.monotonic() + pause
        return pause

    def _broke_at_work(self, error: Any) -> bool:
        """A connection was lost under a call. A router that says that it has no node is no such case: the request may
        be what they cannot bear. Nor is one that refuses after a wait in its line: it has too much to do already."""
        lived = time.monotonic() - self._asked_at >= LIVED_S
        return lived and error.code() in LOST and not _is_refusal(error) and self._routers > 1


def _is_refusal(error: Any) -> bool:
    """Whether a router itself said that it cannot take a call now. A connection that broke says nothing of its load."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return True
    return error.code() is grpc.StatusCode.UNAVAILABLE and TOLD_KEY in dict(error.trailing_metadata() or ())


def lost_error(error: Any, *, resuming: bool = False) -> PacelineError:
    """What a failed call means to its user."""
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        return NodeUnavailable(f"the router ended the request: {error.details()}")
    if resuming and code is grpc.StatusCode.NOT_FOUND:
        return NodeUnavailable(f"the stream broke and cannot be resumed: {error.details()}")
    return error_from_rpc(error)


def _retry_after_s(error: Any) -> float:
    found = dict(error.trailing_metadata() or ())
    return int(found.get(RETRY_AFTER_KEY, "1000")) / 1000
