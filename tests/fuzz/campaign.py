"""How many messages, of which seed, and what became of them.

``PACELINE_FUZZ_SURFACE=10000`` sends that many over gRPC and as many over HTTP (``make fuzz-surface``); without it a
number that takes some 10 s. ``PACELINE_FUZZ_SEED`` draws other messages; every message depends on the seed and its own
number alone, and ``PACELINE_FUZZ_ONLY=number`` sends a single one again. ``PACELINE_FUZZ_KEEP=FILE`` writes the counts
to a file of JSON.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from tests.fuzz.deployment import Deployment

FULL = int(os.environ.get("PACELINE_FUZZ_SURFACE", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "0"))
ONLY = os.environ.get("PACELINE_FUZZ_ONLY", "")
BATCH = 250  # messages between two good requests
AT_ONCE = 12
ANSWER_S = 60.0  # longest wait for an answer
# The longest wait of an honest stream beside them. It is 0.25 s on two idle cores, and 1.4 s beside five other tests.
GAP_S = 0.5 if FULL else 5.0
MOST_FAULTS = 20  # that are told
KEEP = os.environ.get("PACELINE_FUZZ_KEEP", "")

M = TypeVar("M")
Kept = dict[str, Any]  # what each campaign found, by its name: JSON


def seeded(name: str, make: Callable[[random.Random], M]) -> Callable[[int], M]:
    """By number, each from a generator of its own."""
    return lambda number: make(random.Random(f"{SEED}/{name}/{number}"))


def too_few(seen: Counter[str], least: float, *answers: str) -> list[str]:
    """Answers that are no more than this share of all: messages have to get as far as they are meant to."""
    return [answer for answer in answers if not ONLY and seen[answer] <= least * sum(seen.values())]


class Wrongly(AssertionError):
    """An answer that none may get."""


class _Sending(Generic[M]):
    """Messages by their numbers, and what became of them."""

    def __init__(self, name: str, make: Callable[[int], M], send: Callable[[M], Awaitable[str]]) -> None:
        self._name, self._make, self._send = name, make, send
        self._limit = asyncio.Semaphore(AT_ONCE)
        self.seen, self.faults, self.longest_s = Counter[str](), list[str](), 0.0

    async def all(self, numbers: Sequence[int], deployment: Deployment) -> None:
        """Send them, and look at the deployment after each batch; the rest is left out after many faults."""
        for start in range(0, len(numbers), BATCH):
            await asyncio.gather(*map(self._one, numbers[start : start + BATCH]))
            if len(self.faults) > MOST_FAULTS:
                return
            await asyncio.to_thread(deployment.check)
            if FULL:
                print(f"  {start + BATCH}: {dict(self.seen)}", file=sys.stderr, flush=True)

    async def _one(self, number: int) -> None:
        message = self._make(number)
        async with self._limit:
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.seen[await self._send(message)] += 1
            except TimeoutError:
                self.faults.append(f"no answer in {ANSWER_S:g} s\n  {self._name} {number}: {message}")
            except (Wrongly, OSError) as fault:
                self.faults.append(f"{fault}\n  {self._name} {number}: {message}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)


async def campaign(
    name: str,
    deployment: Deployment,
    count: int,
    make: Callable[[int], M],
    send: Callable[[M], Awaitable[str]],
    kept: Kept,
) -> Counter[str]:
    """Send ``count`` messages. make: one by its number. send: returns the answer's name, or raises Wrongly. kept: takes
    the counts.

    Raises AssertionError with every message that was answered wrongly, and when a process died, the good request got
    another answer, a stream beside them waited for GAP_S, or something was left at the end.
    """
    print(f"\n{name}: seed {SEED}, {count} messages", flush=True)
    numbers = [int(ONLY)] if ONLY else list(range(count))
    sending = _Sending(name, make, send)
    async with deployment.honest.beside(deployment.grpc, deployment.http) as honest:
        await sending.all(numbers, deployment)
    seen, faults, longest_s = sending.seen, sending.faults, round(sending.longest_s, 3)
    print(f"{name}: {dict(seen.most_common())}, {len(faults)} wrong, longest {longest_s} s; {honest}", flush=True)
    kept[name] = {"answers": dict(seen), "wrong": len(faults), "longest_s": longest_s, "honest": asdict(honest)}
    assert not faults, "\n".join([f"{len(faults)} answers are wrong, seed {SEED}", *faults[:MOST_FAULTS]])
    assert honest.problems(GAP_S) == []
    await asyncio.to_thread(deployment.at_rest)
    logged = deployment.faults_logged()
    assert not logged, "\n".join(["logged by a process:", *logged[:MOST_FAULTS]])
    return seen
