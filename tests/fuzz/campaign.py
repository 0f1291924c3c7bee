"""How many messages, of which seed, and what became of them.

``PACELINE_FUZZ_SURFACE=10000`` sends that many over gRPC and as many over HTTP (``make fuzz-surface``); without it a
number that takes some 10 s. ``PACELINE_FUZZ_SEED`` draws other messages; every message depends on the seed and its own
number alone, and ``PACELINE_FUZZ_ONLY=number`` sends a single one again.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.fuzz.deployment import Deployment

FULL = int(os.environ.get("PACELINE_FUZZ_SURFACE", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "0"))
ONLY = os.environ.get("PACELINE_FUZZ_ONLY", "")
BATCH = 250  # messages between two good requests
AT_ONCE = 12
ANSWER_S = 60.0  # longest wait for an answer

M = TypeVar("M")


def seeded(name: str, make: Callable[[random.Random], M]) -> Callable[[int], M]:
    """By number, each from a generator of its own."""
    return lambda number: make(random.Random(f"{SEED}/{name}/{number}"))


def reached(seen: Counter[str], least: float, *answers: str) -> None:
    """Messages get as far as they are meant to: each answer is at least this share of all."""
    few = [answer for answer in answers if seen[answer] <= least * sum(seen.values())]
    assert ONLY or not few, f"{few} of {dict(seen)}"


class Wrongly(AssertionError):
    """An answer that none may get."""


async def campaign(
    name: str,
    deployment: Deployment,
    count: int,
    make: Callable[[int], M],
    send: Callable[[M], Awaitable[str]],
) -> Counter[str]:
    """Send ``count`` messages. make: one by its number. send: returns the answer's name, or raises Wrongly.

    Raises AssertionError with every message that was answered wrongly, and when a process died, the good request got
    another answer, or something was left at the end.
    """
    print(f"\n{name}: seed {SEED}, {count} messages", flush=True)
    seen: Counter[str] = Counter()
    faults: list[str] = []
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        message = make(number)
        async with limit:
            try:
                async with asyncio.timeout(ANSWER_S):
                    seen[await send(message)] += 1
            except TimeoutError:
                faults.append(f"no answer in {ANSWER_S:g} s\n  {name} {number}: {message}")
            except (Wrongly, OSError) as fault:
                faults.append(f"{fault}\n  {name} {number}: {message}")

    numbers = [int(ONLY)] if ONLY else list(range(count))
    for start in range(0, len(numbers), BATCH):
        await asyncio.gather(*map(one, numbers[start : start + BATCH]))
        if len(faults) > 20:
            break
        await asyncio.to_thread(deployment.check)
        if FULL:
            print(f"  {start + BATCH}: {dict(seen)}", file=sys.stderr, flush=True)
    print(f"{name}: {dict(seen.most_common())}, {len(faults)} wrong", flush=True)
    assert not faults, "\n".join([f"{len(faults)} answers are wrong, seed {SEED}", *faults[:20]])
    await asyncio.to_thread(deployment.at_rest)
    logged = deployment.faults_logged()
    assert not logged, "\n".join(["logged by a process:", *logged[:20]])
    return seen
