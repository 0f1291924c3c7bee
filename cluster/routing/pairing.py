"""Choosing a pair for each attempt: what the policy says, less what this router knows to have failed.

Per request (`Tries`): nodes that failed it, nodes that had no room for it. For all requests: nodes whose connection is
gone, suspected until there is one again or their lease runs out. Nodes that answer and fail have a circuit breaker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.routing.attempt import Attempt, Pair
from cluster.routing.breaker import Breakers, Key, State, key_of
from cluster.routing.cost import PROMPT_WEIGHT, TRANSFER_WEIGHT
from cluster.routing.node_calls import NodeCalls, NodeFailure
from cluster.routing.policy import NO_HINT, PromptHint, choose_decode, choose_prefill
from cluster.routing.quarantine import Quarantine, Suspicion
from cluster.state.prefix_index import PrefixIndex
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest, NodeUnavailable, Overloaded, PacelineError

MAX_FAILURES = 3  # of prefill nodes, or answers of decode nodes that it failed there; in a row, without a token between
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
MAX_RETRY_AFTER_S = 2.0  # of what a full node wishes, when a stream waits to be resumed
POLL_S = 0.05
LEVELS: dict[State, float] = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


@dataclass
class Tries:
    """What one choice has tried since its last token.

    Prefill nodes that fail never end a request: decode can do without, and does once so many have. Nor do decode nodes
    that are lost: only its deadline does, or proof that it kills them (`quarantine`). A decode node that lives and
    answers that it failed does: so many times in a row, the request is at fault.
    """

    suspicion: Suspicion = field(default_factory=lambda: Quarantine.suspicion("", (), ""))
    goes_on: bool = False  # its client has tokens of another router: its deadline alone ends the wait for a node
    failures: int = 0  # of decode nodes
    answered: int = 0  # of these, where the node lives and says that it failed
    prefill_failures: int = 0
    failed: set[Key] = field(default_factory=set)
    full: dict[Key, Overloaded] = field(default_factory=dict)

    def progressed(self) -> None:
        """A token came: what failed before no longer counts against the bound."""
        self.failures = self.answered = self.prefill_failures = 0
        self.full.clear()

    def note(self, failure: NodeFailure, *, resuming: bool) -> None:
        """Raises the error when there is nothing more to try: the caller's fault, or the last failure."""
        key = (failure.node.id, failure.node.generation)
        if isinstance(failure.error, Overloaded) and not resuming:
            self.full[key] = failure.error
            return
        self.failed.add(key)
        if failure.node.role == "prefill":
            self.prefill_failures += 1
            return
        self.failures += 1
        self.answered += not (failure.gone or isinstance(failure.error, NodeUnavailable))
        if self.answered >= MAX_FAILURES:
            raise failure.error

    def backoff_s(self, error: PacelineError) -> float:
        """Pause before the next attempt; none before another node is asked for room."""
        failures = max(self.failures, self.prefill_failures)
        if not failures:
            return 0.0
        wished = min(error.retry_after_s, MAX_RETRY_AFTER_S) if isinstance(error, Overloaded) else 0.0
        return max(min(FIRST_BACKOFF_S * 2.0 ** min(failures, 10), MAX_BACKOFF_S), wished)


class Pairing:
    """Picks pairs from the registry's view."""

    def __init__(
        self,
        nodes: Callable[[], list[NodeRecord]],
        calls: NodeCalls,
        page_size: int,
        prefixes: PrefixIndex | None = None,
        *,
        wait_s: float = 30.0,
    ) -> None:
        """page_size: of decode nodes. prefixes: what the nodes have cached; None: they are chosen by load alone.
        wait_s: how long a new request waits where no decode node is alive; they may all be starting."""
        self._nodes, self._calls, self._prefixes = nodes, calls, prefixes
        self._page_size, self._wait_s = page_size, wait_s
        self._suspects: dict[Key, NodeRecord] = {}
        self._turn = 0
        self.breakers = Breakers()
        self.quarantine = Quarantine(nodes)

    def breaker_levels(self) -> dict[str, float]:
        """Where breakers stand, by node id: 0 closed, 0.5 half-open, 1 open."""
        return {node.id: LEVELS[self.breakers.state(node)] for node in self._nodes()}

    def suspect(self, failure: NodeFailure) -> None:
        """Remember a node whose connection is gone."""
        if failure.gone:
            self._suspects[key_of(failure.node)] = failure.node
            self._calls.connected(failure.node)  # tried for from now on, whether or not anybody asks for a node

    def alive(self, role: str) -> list[NodeRecord]:
        """Ready nodes of a role that are not suspected."""
        nodes = self._nodes()
        there = {key_of(node) for node in nodes}
        self._suspects = {
            key: node for key, node in self._suspects.items() if key in there and not self._calls.connected(node)
        }
        return [
            node for node in nodes if node.role == role and node.state == "ready" and key_of(node) not in self._suspects
        ]

    def likely(self, token_ids: Sequence[int], salt: str, most: int) -> list[NodeRecord]:
        """At most so many decode nodes, also those that drain, by how much of these tokens they are thought to have
        cached."""
        nodes = [node for node in self._nodes() if node.role == "decode" and key_of(node) not in self._suspects]
        if self._prefixes is not None and len(nodes) > 1:
            cached = self._prefixes.cached_tokens(nodes, token_ids, salt)
            nodes.sort(key=lambda node: -cached.get(key_of(node), 0))
        return nodes[:most]

    async def pick(self, tries: Tries, num_tokens: int, token_ids: Sequence[int] = (), salt: str = "") -> Pair:
        """A pair for a sequence of at most ``num_tokens``, prompt and output. token_ids, salt: what is to be in its KV
        before it decodes, and whose cache it may use. Overloaded when every node is full, NodeUnavailable when no
        decode node comes in time; InvalidRequest for a request that kills nodes."""
        await self._allowed(tries.suspicion)
        nodes = self._nodes()
        await self._calls.prune({node.address for node in nodes})
        self.breakers.retain({key_of(node) for node in nodes})
        prompt = NO_HINT
        if self._prefixes is not None:
            cached = self._prefixes.cached_tokens(nodes, token_ids, salt)
            prompt = PromptHint(len(token_ids), self._page_size, cached)
        decode = await self._pick_decode(tries, num_tokens, prompt)
        while self.quarantine.waits(tries.suspicion):  # the node that it waited for shows what the last one died of
            await self._allowed(tries.suspicion)
            decode = await self._pick_decode(tries, num_tokens, prompt)
        prefill = self._pick_prefill(tries, prompt)
        self._turn += 1
        return Pair(decode, prefill, prompt.cached_tokens(decode), prompt.cached_tokens(prefill) if prefill else 0)

    async def _allowed(self, suspicion: Suspicion) -> None:
        """Return when the request may have another node; InvalidRequest when it may not."""
        while self.quarantine.waits(suspicion):
            await asyncio.sleep(POLL_S)
        self.quarantine.check(suspicion)

    @contextmanager
    def judged(self, attempt: Attempt, suspicion: Suspicion) -> Iterator[None]:
        """Around an attempt of a request: tells the breakers how the nodes of its pair did. suspicion: of the request.

        A fault of the caller and want of room count against no node. When the pair failed, the node to blame is judged
        alone. When the attempt was cancelled, no node is. A node that the attempt went on without is never judged.
        """
        nodes, decode = _members(attempt.pair), attempt.pair.decode
        verdict = self.breakers.left
        for node in nodes:
            self.breakers.began(node)
        try:
            with self.quarantine.running(decode, suspicion):
                yield
            verdict = self.breakers.succeeded
        except NodeFailure as failure:
            # A node whose connection is gone is suspected elsewhere, until it has one again.
            if not failure.gone and not isinstance(failure.error, (InvalidRequest, Overloaded)):
                nodes = [node for node in nodes if key_of(node) != key_of(failure.node)]
                self.breakers.failed(failure.node)
            raise
        finally:
            used = {key_of(node) for node in _members(attempt.pair)}
            for node in nodes:
                (verdict if key_of(node) in used else self.breakers.left)(node)

    async def _pick_decode(self, tries: Tries, num_tokens: int, prompt: PromptHint) -> NodeRecord:
        pages = -(-num_tokens // self._page_size)
        end = time.monotonic() + self._wait_s
        while True:
            candidates = _preferred(self.breakers.usable_or_oldest(self.alive("decode")), tries)
            weight = TRANSFER_WEIGHT if self.alive("prefill") else PROMPT_WEIGHT
            node = choose_decode(candidates, self._calls.own, pages, self._turn, prompt, weight)
            if node is not None:
                return node
            failed = bool(tries.goes_on or tries.failures or tries.prefill_failures)  # it waits until its deadline
            if not failed and time.monotonic() >= end:
                raise NodeUnavailable(f"no decode node is alive, nor came to life within {self._wait_s:g} s")
            await asyncio.sleep(POLL_S)

    def _pick_prefill(self, tries: Tries, prompt: PromptHint) -> NodeRecord | None:
        """None: decode is to prefill by itself, because no prefill node is left that did not fail this request or
        many before it, or because enough of them have failed this one."""
        if tries.prefill_failures >= MAX_FAILURES:
            return None
        alive = self.breakers.usable(self.alive("prefill"))
        left = [node for node in alive if key_of(node) not in tries.failed]
        room = _with_room(left, tries)
        return choose_prefill(room, self._calls.own, self._turn, self._calls.own_tokens, prompt)


def _members(pair: Pair) -> list[NodeRecord]:
    return [pair.decode] if pair.prefill is None else [pair.decode, pair.prefill]


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
