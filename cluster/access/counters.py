"""What keys have used, counted in this process. `cluster.access.redis_counters` counts the same for several routers.

A limit per minute is a token bucket: it holds a minute's worth, is full at first, and fills evenly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.access.keys import Limits

MINUTE_S = 60.0
BUDGET_RETRY_S = 3600.0  # a budget comes back by an operator's hand alone


@dataclass(frozen=True)
class Ask:
    """What one decision is about; all of it is taken, or nothing. ``hold`` names what ``give`` gives back."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    hold: str = ""


@dataclass(frozen=True)
class Refusal:
    """``limit``: the name of the field of `Limits` that said no; ``wait_s``: seconds until it may say yes."""

    limit: str
    wait_s: float


class Counters(Protocol):
    """Where the counts are. They may raise OSError and redis.RedisError where they are elsewhere."""

    async def take(self, key_id: str, limits: Limits, ask: Ask) -> Refusal | None:
        """Take what is asked for. None: it is taken."""

    async def give(self, key_id: str, limits: Limits, ask: Ask, unused: int) -> None:
        """The sequences of ``ask`` are over, and ``unused`` of its tokens were not used. Doing it again does nothing,
        nor does it for an ask that was refused."""


@dataclass
class _Used:
    at: float
    requests: float = math.inf  # in the bucket; a limit that is new begins with a full one
    tokens: float = math.inf  # in the bucket
    total: int = 0
    holds: dict[str, Ask] = field(default_factory=dict)
    sequences: int = 0
    in_flight: int = 0


class LocalCounters:
    """Counts of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[str, _Used] = {}  # no more than the file has had keys

    async def take(self, key_id: str, limits: Limits, ask: Ask) -> Refusal | None:
        """See Counters."""
        used = self._refilled(key_id, limits)
        if refusal := _refusal(used, limits, ask):
            return refusal
        used.requests -= ask.requests if limits.requests_per_minute else 0
        used.tokens -= ask.tokens if limits.tokens_per_minute else 0
        used.total += ask.tokens
        if ask.hold:
            used.holds[ask.hold] = ask
            used.sequences += ask.sequences
            used.in_flight += ask.tokens
        return None

    async def give(self, key_id: str, limits: Limits, ask: Ask, unused: int) -> None:
        """See Counters."""
        used = self._refilled(key_id, limits)
        if used.holds.pop(ask.hold, None) is None:
            return
        used.sequences -= ask.sequences
        used.in_flight -= ask.tokens
        if limits.tokens_per_minute:
            used.tokens = min(limits.tokens_per_minute, used.tokens + unused)
        used.total -= unused

    def _refilled(self, key_id: str, limits: Limits) -> _Used:
        """The key's counts, with its buckets filled up to now."""
        now = self._clock()
        used = self._keys.setdefault(key_id, _Used(now))
        minutes = (now - used.at) / MINUTE_S
        used.requests = _filled(used.requests, limits.requests_per_minute, minutes)
        used.tokens = _filled(used.tokens, limits.tokens_per_minute, minutes)
        used.at = now
        return used


def _filled(has: float, most: int | None, minutes: float) -> float:
    return has if most is None else min(most, has + minutes * most)


def _refusal(used: _Used, limits: Limits, ask: Ask) -> Refusal | None:
    """Why it cannot be taken. `cluster.access.redis_counters` says the same in Lua."""
    if ask.requests and limits.requests_per_minute and used.requests < ask.requests:
        return Refusal("requests_per_minute", _wait_s(ask.requests - used.requests, limits.requests_per_minute))
    if ask.sequences and limits.concurrency and used.sequences + ask.sequences > limits.concurrency:
        return Refusal("concurrency", 1.0)
    if ask.tokens and limits.tokens_in_flight and used.in_flight + ask.tokens > limits.tokens_in_flight:
        return Refusal("tokens_in_flight", 1.0)
    if ask.tokens and limits.budget_tokens and used.total + ask.tokens > limits.budget_tokens:
        return Refusal("budget_tokens", BUDGET_RETRY_S)
    if ask.tokens and limits.tokens_per_minute and used.tokens < ask.tokens:
        return Refusal("tokens_per_minute", _wait_s(ask.tokens - used.tokens, limits.tokens_per_minute))
    return None


def _wait_s(missing: float, per_minute: int) -> float:
    return missing * MINUTE_S / per_minute
