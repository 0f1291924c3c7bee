"""Choosing a pair for each attempt: what the policy says, less what this router knows to have failed.

Per request (`Tries`): nodes that failed it, nodes that had no room for it. For all requests: nodes whose connection is
gone, suspected until their lease would have run out; who is still registered then is alive. Nodes that answer and
fail have a circuit breaker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.attempt import Pair
from cluster.breaker import Breakers, Key, State, key_of
from cluster.node_calls import NodeCalls, NodeFailure
from cluster.policy import choose_decode, choose_prefill
from cluster.registry_types import NodeRecord
from paceline.errors import InvalidRequest, NodeUnavailable, Overloaded, PacelineError

MAX_FAILURES = 3  # in a row, without a token between
FIRST_BACKOFF_S = 0.05
MAX_RETRY_AFTER_S = 2.0  # of what a full node wishes, when a stream waits to be resumed
NODE_WAIT_S = 30.0  # longest wait for a decode node to come back
POLL_S = 0.05
LEVELS: dict[State, float] = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
SUSPECT_LEASES = 1.5  # leases that a node stays suspected for


@dataclass
class Tries:
    """What one choice has tried since its last token."""

    failures: int = 0
    failed: set[Key] = field(default_factory=set)
    full: dict[Key, Overloaded] = field(default_factory=dict)

    def progressed(self) -> None:
        """A token came: what failed before no longer counts against the bound."""
        self.failures = 0
        self.full.clear()

    def note(self, failure: NodeFailure, *, resuming: bool) -> None:
        """Raises the error when there is nothing more to try: the caller's fault, or the last failure."""
        key = (failure.node.id, failure.node.generation)
        if isinstance(failure.error, Overloaded) and not resuming:
            self.full[key] = failure.error
            return
        self.failed.add(key)
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            raise failure.error

    def backoff_s(self, error: PacelineError) -> float:
        """Pause before the next attempt; none before another node is asked for room."""
        if not self.failures:
            return 0.0
        wished = min(error.retry_after_s, MAX_RETRY_AFTER_S) if isinstance(error, Overloaded) else 0.0
        return max(FIRST_BACKOFF_S * float(2**self.failures), wished)


class Pairing:
    """Picks pairs from the registry's view."""

    def __init__(
        self, nodes: Callable[[], list[NodeRecord]], calls: NodeCalls, page_size: int, lease_ttl_s: float
    ) -> None:
        self._nodes, self._calls = nodes, calls
        self._page_size, self._lease_ttl_s = page_size, lease_ttl_s
        self._suspects: dict[Key, float] = {}  # until when, monotonic clock
        self._turn = 0
        self.breakers = Breakers()

    def breaker_levels(self) -> dict[str, float]:
        """By node id: 0 closed, 0.5 half-open, 1 open."""
        return {node.id: LEVELS[self.breakers.state(node)] for node in self._nodes()}

    def suspect(self, failure: NodeFailure) -> None:
        """Remember a node whose connection is gone."""
        if failure.gone:
            until = time.monotonic() + SUSPECT_LEASES * self._lease_ttl_s
            self._suspects[failure.node.id, failure.node.generation] = until

    def alive(self, role: str) -> list[NodeRecord]:
        """Ready nodes of a role that are not suspected."""
        now = time.monotonic()
        self._suspects = {key: until for key, until in self._suspects.items() if until > now}
        return [
            node
            for node in self._nodes()
            if node.role == role and node.state == "ready" and (node.id, node.generation) not in self._suspects
        ]

    async def pick(self, tries: Tries, num_tokens: int) -> Pair:
        """A pair for a sequence of at most ``num_tokens``, prompt and output. Overloaded when every node is full,
        NodeUnavailable when there is no decode node, nor one coming back in time."""
        nodes = self._nodes()
        await self._calls.prune({node.address for node in nodes})
        self.breakers.retain({key_of(node) for node in nodes})
        decode = await self._pick_decode(tries, num_tokens)
        prefill = self._pick_prefill(tries)
        self._turn += 1
        return Pair(decode, prefill)

    @contextmanager
    def judged(self, pair: Pair) -> Iterator[None]:
        """Around an attempt on the pair: tells the breakers how its nodes did. The caller's fault and want of room are
        no fault of a node; of a pair that failed only the one to blame is judged, of one cancelled neither."""
        nodes = [pair.decode] if pair.prefill is None else [pair.decode, pair.prefill]
        verdict = self.breakers.left
        for node in nodes:
            self.breakers.began(node)
        try:
            yield
            verdict = self.breakers.succeeded
        except NodeFailure as failure:
            # One whose connection is gone is suspected for as long as its lease lasts: who is there after that is well.
            if not failure.gone and not isinstance(failure.error, (InvalidRequest, Overloaded)):
                nodes = [node for node in nodes if key_of(node) != key_of(failure.node)]
                self.breakers.failed(failure.node)
            raise
        finally:
            for node in nodes:
                verdict(node)

    async def _pick_decode(self, tries: Tries, num_tokens: int) -> NodeRecord:
        pages = -(-num_tokens // self._page_size)
        end = time.monotonic() + NODE_WAIT_S
        while True:
            candidates = _preferred(self.breakers.usable_or_oldest(self.alive("decode")), tries)
            node = choose_decode(candidates, self._calls.own, pages, self._turn)
            if node is not None:
                return node
            coming_back = tries.failures > 0 or bool(self._suspects)
            if not coming_back or time.monotonic() >= end:
                raise NodeUnavailable("no decode node is alive")
            await asyncio.sleep(POLL_S)

    def _pick_prefill(self, tries: Tries) -> NodeRecord | None:
        """None: decode is to prefill by itself, because no prefill node is left that did not fail this request or
        many before it."""
        alive = self.breakers.usable(self.alive("prefill"))
        left = [node for node in alive if key_of(node) not in tries.failed]
        return choose_prefill(_with_room(left, tries), self._calls.own, self._turn, self._calls.own_tokens)


def _preferred(nodes: list[NodeRecord], tries: Tries) -> list[NodeRecord]:
    """Those that did not fail this request; when all did, any that is alive."""
    fresh = [node for node in nodes if (node.id, node.generation) not in tries.failed]
    return _with_room(fresh or nodes, tries)


def _with_room(nodes: list[NodeRecord], tries: Tries) -> list[NodeRecord]:
    """Those that did not refuse for want of room. Overloaded when all did."""
    room = [node for node in nodes if (node.id, node.generation) not in tries.full]
    if nodes and not room:
        refusals: list[PacelineError] = [tries.full[node.id, node.generation] for node in nodes]
        raise refusals[-1]
    return room
