"""Quotas: exact, whole, given back; the counts of this process and those in Redis decide alike."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
import redis

from cluster.access import redis_counters
from cluster.access.caller import Caller
from cluster.access.counters import Ask, LocalCounters
from cluster.access.keys import Limits
from cluster.access.quotas import Hold, Quotas
from cluster.access.redis_counters import RedisCounters
from cluster.routing.metrics import Metrics
from paceline.errors import InvalidRequest, Overloaded
from tests.fakes.redis_servers import Embedded
from tests.support.api_keys import asked_by, caller
from tests.support.router_asks import ask
from tests.support.scripted_nodes import fleet


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    made.close()


async def test_both_counts_decide_alike(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random takes and gives of keys with every limit. Mutant: any comparison of the script."""
    monkeypatch.setattr(redis_counters, "TIMEOUT_S", 10.0)  # how fast they decide is not what is compared
    rng, said = random.Random(5), set()
    own, shared, apart_s = LocalCounters(time.time), RedisCounters(server.url, 600.0, "alike"), 0.2
    for name, of_total in (("a", {"tokens_per_minute": 900}), ("b", {"budget_tokens": 900})):
        limits = Limits(requests_per_minute=40, concurrency=6, tokens_in_flight=250, **of_total)
        open_: list[Ask] = []
        for i in range(200):
            if open_ and rng.random() < 0.4:
                ask = open_.pop(rng.randrange(len(open_)))
                for counters in (own, shared) * 2:  # a second time does nothing
                    await counters.give(name, limits, ask, ask.tokens // 3)
                continue
            some = Ask(sequences=rng.randint(1, 3), tokens=rng.randint(1, 150), hold=f"{i}")
            ask = rng.choice((Ask(requests=1), some))
            began = time.monotonic()
            first, second = await own.take(name, limits, ask), await shared.take(name, limits, ask)
            apart_s = max(apart_s, time.monotonic() - began + 0.1)
            for counters, said_no in ((own, first), (shared, second)):  # a bucket filled between the two
                if (first is None) != (second is None) and said_no is not None and said_no.wait_s < apart_s:
                    await asyncio.sleep(said_no.wait_s + 0.005)
                    assert await counters.take(name, limits, ask) is None, i
                    first = second = None
            assert (first and first.limit) == (second and second.limit), i
            said.add(first.limit if first else "")
            if first is None and ask.hold:
                open_.append(ask)
    await shared.close()
    assert said == {"", *Limits.model_fields}


async def test_a_limit_that_is_new_begins_with_a_full_bucket(server: Embedded) -> None:
    """The key has a limit of another kind at first. Mutant: tokens are taken from a bucket that has no limit."""
    before, after = Limits(concurrency=9), Limits(concurrency=9, tokens_per_minute=100, requests_per_minute=5)
    shared = RedisCounters(server.url, 600.0, "new limit")
    for counters in (LocalCounters(), shared):
        for hold in "ab":
            assert await counters.take("k", before, Ask(sequences=1, tokens=5000, hold=hold)) is None
        await counters.give("k", before, Ask(sequences=1, tokens=5000, hold="a"), 4000)
        assert await counters.take("k", after, Ask(requests=5)) is None
        assert await counters.take("k", after, Ask(sequences=1, tokens=100, hold="c")) is None
        assert await counters.take("k", after, Ask(sequences=1, tokens=100, hold="d")) is not None
    await shared.close()


async def test_the_clock_of_redis_is_set_back(server: Embedded) -> None:
    """What was noted at a time to come counts as noted now. Mutant: a bucket waits for that time to fill."""
    counters, limits = RedisCounters(server.url, 600.0, "clock"), Limits(requests_per_minute=600)
    assert await counters.take("k", limits, Ask(requests=600)) is None
    with redis.Redis.from_url(server.url) as client:
        client.hincrby(counters._keys("k")[0], "requests_at", 3_600_000)
    assert await counters.take("k", limits, Ask(requests=1)) is not None
    await asyncio.sleep(0.15)
    assert await counters.take("k", limits, Ask(requests=1)) is None
    await counters.close()


@pytest.mark.parametrize("gone", [0, 1], ids=["sums", "holds"])
async def test_redis_evicts_one_of_a_keys_two(server: Embedded, gone: int) -> None:
    """Both expire, so a Redis whose memory is full may let either go. Mutants: sequences that nobody gives back stay;
    those given back twice make room for more than the limit."""
    counters, limits = RedisCounters(server.url, 600.0, f"evicted {gone}"), Limits(concurrency=2)
    asks = [Ask(sequences=1, tokens=5, hold=hold) for hold in "abcdefg"]
    for one in asks[:2]:
        assert await counters.take("k", limits, one) is None
    with redis.Redis.from_url(server.url) as client:
        client.delete(counters._keys("k")[gone])
    for one in asks[:2]:
        await counters.give("k", limits, one, 0)
    taken = [await counters.take("k", limits, one) is None for one in asks[2:]]
    assert taken == [True, True, False, False, False]
    await counters.close()


# Each lets 20 asks through, of one sequence and ten tokens; those of a minute let one more through every 3 s.
OF_20 = {
    "requests_per_minute": 20,
    "tokens_per_minute": 200,
    "concurrency": 20,
    "tokens_in_flight": 200,
    "budget_tokens": 200,
}
TOKENS, REFILL_S = 10, 3.0


async def take(router: Quotas, key: Caller) -> Hold | None:
    """One ask; what is to be given back. Raises Overloaded."""
    if key.key.requests_per_minute is not None:
        await router.request(key)
        return None
    return await router.hold(key, 1, TOKENS)


def refilled(limit: str, since: float) -> int:
    """Asks that a bucket lets through by now, beyond those at once."""
    return int((time.monotonic() - since) / REFILL_S) + 1 if limit.endswith("per_minute") else 0


async def admitted(routers: Sequence[Quotas], key: Caller) -> list[Hold | float]:
    """60 asks at once, spread over the routers: what each that was let in holds, 0 where that is nothing; the rest must
    be told a time to come back, in seconds."""
    waits: list[float] = []

    async def one(i: int) -> Hold | float | None:
        try:
            return await take(routers[i % len(routers)], key) or 0.0
        except Overloaded as refused:
            waits.append(refused.retry_after_s)
        return None

    found = await asyncio.gather(*(one(i) for i in range(60)))
    assert all(wait > 0 for wait in waits)
    return [hold for hold in found if hold is not None]


@pytest.mark.parametrize("limit", OF_20)
async def test_four_routers_admit_exactly(server: Embedded, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """And once more when the answers are over, which have used half of their tokens. Mutants: a read and a write in
    place of the script; what one router gives back is not there for the others."""
    monkeypatch.setattr(redis_counters, "TIMEOUT_S", 10.0)  # on a busy machine, too, Redis is not away
    key = caller("acme", **{limit: OF_20[limit]})
    routers = [Quotas(RedisCounters(server.url, 600.0, f"four {limit}"), Metrics()) for _ in range(4)]
    began = time.monotonic()
    first = await admitted(routers, key)
    assert 20 <= len(first) < 21 + refilled(limit, began)
    for i, hold in enumerate(first):
        if isinstance(hold, Hold):
            routers[i % 4].release(hold, TOKENS // 2)
    await asyncio.gather(*(task for router in routers for task in router._giving))
    again = {"requests_per_minute": 0, "tokens_per_minute": 10, "budget_tokens": 10}.get(limit, 20)
    assert again <= len(await admitted(routers, key)) <= again + refilled(limit, began)
    for router in routers:
        await router.close()


# A router as a process: it tells each ask that it admits. Its sequences end 1.5 s after they began, at the latest.
DEAD_FOR_S = 1.5
ROUTER = """
import asyncio, json, sys
from cluster.access import redis_counters
from cluster.access.quotas import Quotas
from cluster.access.redis_counters import RedisCounters
from cluster.routing.metrics import Metrics
from paceline.errors import Overloaded
from tests.support.api_keys import caller

async def main():
    redis_counters.TIMEOUT_S = 10.0
    url, name, limits, ttl_s = sys.argv[1:]
    counters, key = RedisCounters(url, 600.0, name), caller("acme", **json.loads(limits))
    counters._ttl_ms = int(float(ttl_s) * 1000)
    quotas = Quotas(counters, Metrics())
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        try:
            await (quotas.request(key) if key.key.requests_per_minute else quotas.hold(key, 1, 10))
            print("admitted", flush=True)
        except Overloaded:
            pass

asyncio.run(main())
"""


@pytest.mark.parametrize("limit", OF_20)
async def test_four_routers_stay_exact_while_one_is_killed(
    server: Embedded, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The answer that the dead one had no time to tell may be missing. What it had running comes back. Mutants: each
    counts for itself; sequences of a router that died stay."""
    monkeypatch.setattr(redis_counters, "TIMEOUT_S", 10.0)  # on a busy machine, too, Redis is not away
    limits, name = {limit: OF_20[limit]}, f"killed {limit}"
    key, living = caller("acme", **limits), 0
    routers = [Quotas(RedisCounters(server.url, 600.0, name), Metrics()) for _ in range(3)]

    async def ask(router: Quotas, until: Callable[[], bool]) -> None:
        nonlocal living
        while not until():
            with suppress(Overloaded):
                await take(router, key)
                living += 1
            await asyncio.sleep(0.01)

    command = [sys.executable, "-c", ROUTER, server.url, name, json.dumps(limits), str(DEAD_FOR_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdin is not None
        assert dying.stdout is not None
        assert await asyncio.to_thread(dying.stdout.readline) == "ready\n"
        began = time.monotonic()
        dying.stdin.write("go\n")
        dying.stdin.flush()
        asking = [asyncio.create_task(ask(router, lambda: time.monotonic() > began + 0.5)) for router in routers]
        assert await asyncio.to_thread(dying.stdout.readline) == "admitted\n"
        dying.kill()
        dead = 1 + len((await asyncio.to_thread(dying.stdout.read)).splitlines())
    await asyncio.gather(*asking)
    comes_back = limit in ("concurrency", "tokens_in_flight")
    early = dead if comes_back and time.monotonic() > began + DEAD_FOR_S else 0  # where this machine stood still
    assert 19 <= dead + living <= 20 + refilled(limit, began) + early, (dead, living)
    if comes_back:
        end = time.monotonic() + DEAD_FOR_S + 5.0
        await asyncio.gather(*(ask(router, lambda: living >= 20 or time.monotonic() > end) for router in routers))
        await asyncio.sleep(0.1)
        assert living == 20
    for router in routers:
        await router.close()


async def test_sequences_of_a_router_that_died_come_back(server: Embedded) -> None:
    limits, counters = Limits(concurrency=1), RedisCounters(server.url, 600.0, "dead")
    counters._ttl_ms = 80
    assert await counters.take("k", limits, Ask(sequences=1, tokens=5, hold="a")) is None
    refused = await counters.take("k", limits, Ask(sequences=1, tokens=5, hold="b"))
    assert refused is not None
    assert refused.limit == "concurrency"
    await asyncio.sleep(0.1)
    assert await counters.take("k", limits, Ask(sequences=1, tokens=5, hold="b")) is None
    await counters.close()


async def test_what_is_not_used_is_given_back_and_what_never_fits_is_named() -> None:
    quotas = Quotas(None, Metrics())
    key = caller("acme", tokens_per_minute=100, budget_tokens=130, concurrency=2)
    hold = await quotas.hold(key, 1, 100)
    with pytest.raises(Overloaded, match="100 tokens a minute") as caught:
        await quotas.hold(key, 1, 10)
    assert caught.value.retry_after_s == pytest.approx(6.0, abs=0.1)
    quotas.release(hold, 30)
    await asyncio.sleep(0)
    second = await quotas.hold(key, 2, 60)
    with pytest.raises(Overloaded, match="2 sequences at once"):
        await quotas.hold(key, 1, 1)
    quotas.release(second, 60)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="130 tokens in all"):
        await quotas.hold(key, 1, 41)
    for n, tokens, field in ((3, 1, "n"), (1, 101, "max_tokens")):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            await quotas.hold(key, n, tokens)
    await quotas.close()


async def test_a_request_that_never_ran_costs_no_tokens() -> None:
    """Its turn did not come. Mutant: the prompt counts from the plan on."""
    quotas, who = Quotas(None, Metrics()), caller("acme", budget_tokens=100)
    async with fleet(max_inflight=1, queue_timeout_s=0.1) as made:
        made.router._quotas = quotas
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        first = asyncio.create_task(asked_by(who, made.router.complete(ask())))
        while not made.router._admission.running_slots:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded, match="did not come"):
            await asyncio.create_task(asked_by(who, made.router.complete(ask())))
        gate.set()
        await first
        await asyncio.sleep(0)
    used = quotas._own._keys["acme"]
    assert (used.total, used.sequences, used.in_flight) == (len("hello") + 10, 0, 0)


async def test_without_redis_each_router_counts_for_itself_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    server, metrics, key = Embedded(), Metrics(), caller("acme", requests_per_minute=3)
    quotas = Quotas(RedisCounters(server.url, 600.0, "alone"), metrics)
    for _ in range(3):
        await quotas.request(key)
    server.kill()
    started = time.monotonic()
    for _ in range(3):
        await quotas.request(key)
    assert time.monotonic() - started < 1.0
    with pytest.raises(Overloaded):
        await quotas.request(key)
    assert caplog.text.count("counted by this router alone") == 1
    assert b"paceline_quotas_alone 1.0" in metrics.render()
    server.start_again()
    quotas._away_until = 0.0
    await quotas.request(key)
    assert b"paceline_quotas_alone 0.0" in metrics.render()
    await quotas.close()
    server.close()


async def test_what_a_redis_took_too_late_is_given_back(server: Embedded) -> None:
    """It stands still for longer than requests wait for it. Mutants: a late yes keeps its sequence until its time is
    over; what could not be given back is forgotten."""
    shared = RedisCounters(server.url, 600.0, "late")
    quotas, key = Quotas(shared, Metrics()), caller("acme", concurrency=2)
    early = await quotas.hold(key, 1, 10)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        quotas.release(await quotas.hold(key, 1, 10), 10)
        quotas.release(early, 10)
        await asyncio.sleep(0.3)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    end = time.monotonic() + 10.0
    both = Ask(sequences=2, tokens=10, hold="both")
    while (refused := await shared.take("acme", key.key, both)) is not None and time.monotonic() < end:
        await asyncio.sleep(0.1)
    assert refused is None
    await quotas.close()
