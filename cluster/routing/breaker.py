"""Circuit breakers: a node that is alive but fails what it is asked is left alone for a while.

One per node and generation, so that a restarted node begins closed:

    closed --FAILURES_TO_OPEN failures in a row--> open --OPEN_S--> half-open --SUCCESSES_TO_CLOSE in a row--> closed
                                                    ^                   |
                                                    +----- a failure ---+

Half-open lets one attempt through at a time. A success while open (of an attempt begun before) changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.state.registry_types import NodeRecord

# SGLang's gateway: 5 failures open, 2 successes close, 30 s between.
FAILURES_TO_OPEN = 5
SUCCESSES_TO_CLOSE = 2
OPEN_S = 30.0

State = Literal["closed", "half_open", "open"]
Key = tuple[str, int]  # id and generation


@dataclass
class _Breaker:
    failures: int = 0  # in a row, while closed
    successes: int = 0  # in a row, while half-open
    opened_at: float | None = None  # None: closed
    probing: bool = False  # half-open, and an attempt is under way


def key_of(node: NodeRecord) -> Key:
    """What names a breaker."""
    return node.id, node.generation


class Breakers:
    """All breakers of a router, on one clock (seconds, monotonic)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._breakers: dict[Key, _Breaker] = {}  # of nodes that failed lately; any other is closed

    def state(self, node: NodeRecord) -> State:
        """Where the breaker of a node stands now."""
        breaker = self._breakers.get(key_of(node))
        if breaker is None or breaker.opened_at is None:
            return "closed"
        return "half_open" if self._clock() - breaker.opened_at >= OPEN_S else "open"

    def admits(self, node: NodeRecord) -> bool:
        """Whether an attempt may be made on the node."""
        state = self.state(node)
        return state == "closed" or (state == "half_open" and not self._breakers[key_of(node)].probing)

    def usable(self, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Those that admit an attempt."""
        return [node for node in nodes if self.admits(node)]

    def usable_or_oldest(self, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Those that admit an attempt; when none does, the one that opened first: it may have recovered, and refusing
        everything helps nobody."""
        usable = self.usable(nodes)
        if usable or not nodes:
            return usable
        return [min(nodes, key=lambda node: self._breakers[key_of(node)].opened_at or 0.0)]

    def began(self, node: NodeRecord) -> None:
        """An attempt begins; each ends in ``succeeded``, ``failed`` or ``left``."""
        if self.state(node) == "half_open":
            self._breakers[key_of(node)].probing = True

    def succeeded(self, node: NodeRecord) -> None:
        """An attempt did all that was asked of the node."""
        breaker = self._breakers.get(key_of(node))
        if breaker is None:
            return
        state = self.state(node)
        if state == "half_open":
            breaker.probing = False
            breaker.successes += 1
        if state == "closed" or breaker.successes >= SUCCESSES_TO_CLOSE:
            del self._breakers[key_of(node)]

    def failed(self, node: NodeRecord) -> None:
        """An attempt failed by the node's fault."""
        breaker = self._breakers.setdefault(key_of(node), _Breaker())
        if self.state(node) == "open":  # begun before it opened, or tried for want of another
            return
        breaker.failures += 1
        if breaker.opened_at is not None or breaker.failures >= FAILURES_TO_OPEN:
            breaker.opened_at, breaker.successes, breaker.probing = self._clock(), 0, False

    def left(self, node: NodeRecord) -> None:
        """An attempt ended and says nothing about the node: cancelled, refused for want of room, or another's fault."""
        breaker = self._breakers.get(key_of(node))
        if breaker is not None:
            breaker.probing = False

    def retain(self, alive: Collection[Key]) -> None:
        """Forget nodes that are gone, which bounds the table."""
        for key in [key for key in self._breakers if key not in alive]:
            del self._breakers[key]
