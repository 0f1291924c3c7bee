"""Quotas of API keys: what a call takes before it is served, and what it gives back.

The counts are in Redis where the deployment has one, and so exact for all its routers. While Redis is away each router
counts for itself from a full bucket: with N routers a key may then use up to N times its limits, and a minute's worth
besides.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

import redis

from cluster.access.caller import Caller
from cluster.access.counters import Ask, Counters, LocalCounters, Refusal
from cluster.access.keys import Limits
from cluster.access.redis_counters import RedisCounters
from paceline.errors import InvalidRequest, Overloaded

log = logging.getLogger(__name__)

RETRY_S = 1.0  # between two tries while Redis is away
GIVE_TIMEOUT_S = 1.0  # for what is still to be given back at the end
MAX_OWED = 4096  # requests whose part Redis did not take back yet; those of more end there by their time
_WORDS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrency": "sequences at once",
    "tokens_in_flight": "tokens in flight",
    "budget_tokens": "tokens in all",
}


class AccessCounts(Protocol):
    """cluster.routing.metrics.Metrics, as far as access needs it."""

    def access_refused(self, reason: str) -> None:
        """A call was refused. reason: the error's class, what the call named, or a quota."""

    def quotas_alone(self, alone: bool) -> None:
        """Whether this router counts for itself, since Redis is away."""


@dataclass(frozen=True)
class Hold:
    """What a request has of its key's quotas until it is over."""

    key_id: str
    limits: Limits
    ask: Ask
    counters: Counters


class Quotas:
    """What keys may use. ``close`` it."""

    def __init__(self, shared: RedisCounters | None, metrics: AccessCounts, own: LocalCounters | None = None) -> None:
        """shared: counts of all routers; None: each router counts for itself."""
        self._shared, self._metrics = shared, metrics
        self._own = LocalCounters() if own is None else own
        self._away_until = 0.0
        self._away = False
        self._giving: set[asyncio.Task[None]] = set()
        self._owed: dict[str, tuple[Hold, int]] = {}  # by the ask's name: what is to be given back, unused tokens
        self._repaying: asyncio.Task[None] | None = None

    async def request(self, caller: Caller) -> None:
        """One more call of the key. Raises Overloaded."""
        if caller.key.requests_per_minute is not None:
            await self._take(caller, Ask(requests=1))

    async def hold(self, caller: Caller | None, sequences: int, tokens: int) -> Hold | None:
        """For a request that is about to be queued; ``release`` it. None: nothing to give back. tokens: of prompt and
        output at most, all sequences. Raises Overloaded, and InvalidRequest for what the key never has."""
        if caller is None:
            return None
        key = caller.key
        if not (key.concurrency or key.tokens_in_flight or key.budget_tokens or key.tokens_per_minute):
            return None
        if key.concurrency is not None and sequences > key.concurrency:
            raise InvalidRequest("n", f"the API key has {key.concurrency} sequences at once, got {sequences}")
        for name in ("tokens_per_minute", "tokens_in_flight"):
            most = getattr(key, name)
            if most is not None and tokens > most:
                text = f"prompt and output may take {tokens} tokens, and the API key has {most} {_WORDS[name]}"
                raise InvalidRequest("max_tokens", text)
        ask = Ask(sequences=sequences, tokens=tokens, hold=secrets.token_hex(8))
        try:
            return Hold(key.id, key, ask, await self._take(caller, ask))
        except asyncio.CancelledError:  # Redis may have it already
            self.release(Hold(key.id, key, ask, self._shared or self._own), 0)
            raise

    def release(self, hold: Hold | None, tokens: int) -> None:
        """The request is over, having used ``tokens`` of prompt and output."""
        if hold is None:
            return
        task = asyncio.get_running_loop().create_task(self._give(hold, max(0, hold.ask.tokens - tokens)))
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def close(self) -> None:
        """Give back what is over, for a moment, then end. Idempotent."""
        if self._giving:
            await asyncio.wait(self._giving, timeout=GIVE_TIMEOUT_S)
        if self._repaying is not None:
            self._repaying.cancel()
        if self._shared is not None:
            await self._shared.close()

    async def _take(self, caller: Caller, ask: Ask) -> Counters:
        """The counters that have it now. Raises Overloaded."""
        counters, refusal = await self._decide(caller, ask)
        if refusal is not None:
            self._metrics.access_refused(refusal.limit)
            most = getattr(caller.key, refusal.limit)
            raise Overloaded(f"the API key has {most} {_WORDS[refusal.limit]}, and they are used up", refusal.wait_s)
        return counters

    async def _decide(self, caller: Caller, ask: Ask) -> tuple[Counters, Refusal | None]:
        if self._shared is not None and time.monotonic() >= self._away_until:
            try:
                refusal = await self._shared.take(caller.key.id, caller.key, ask)
            except (redis.RedisError, OSError) as error:
                self._note_away(error)
                self._owe(Hold(caller.key.id, caller.key, ask, self._shared), ask.tokens)  # it may take it yet
            else:
                self._note_back()
                return self._shared, refusal
        return self._own, await self._own.take(caller.key.id, caller.key, ask)

    async def _give(self, hold: Hold, unused: int) -> None:
        try:
            await hold.counters.give(hold.key_id, hold.limits, hold.ask, unused)
        except (redis.RedisError, OSError) as error:
            self._note_away(error)
            self._owe(hold, unused)

    def _owe(self, hold: Hold, unused: int) -> None:
        """Give it back when Redis answers again."""
        if not hold.ask.hold or len(self._owed) >= MAX_OWED:
            return
        self._owed[hold.ask.hold] = hold, unused
        if self._repaying is None or self._repaying.done():
            self._repaying = asyncio.get_running_loop().create_task(self._repay(), name="quotas owed")

    async def _repay(self) -> None:
        while self._owed:
            await asyncio.sleep(RETRY_S)
            for name, (hold, unused) in list(self._owed.items()):
                del self._owed[name]
                try:
                    await hold.counters.give(hold.key_id, hold.limits, hold.ask, unused)
                except (redis.RedisError, OSError):
                    self._owed[name] = hold, unused  # behind the others
                    break

    def _note_away(self, error: Exception) -> None:
        self._away_until = time.monotonic() + RETRY_S
        if not self._away:
            log.warning("quotas are counted by this router alone, since Redis does not answer: %s", error)
        self._away = True
        self._metrics.quotas_alone(True)

    def _note_back(self) -> None:
        if self._away:
            log.warning("quotas are counted in Redis again")
            self._away = False
            self._metrics.quotas_alone(False)
