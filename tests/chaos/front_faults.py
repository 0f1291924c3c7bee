"""Faults on routers and on Redis, each shown to have hurt.

| kind              | what is done                                    | shown by                             |
|-------------------|-------------------------------------------------|--------------------------------------|
| `router kill`     | kill -9 of any other; it is started again       | its streams left it                  |
| `router stop`     | SIGSTOP of any router                           | the same                             |
| `supervisor kill` | kill -9 of the one that supervises              | another one supervises               |
| `supervisor stop` | SIGSTOP of the one that supervises              | the same                             |
| `router cut off`  | nothing reaches any router                      | the same, and packets refused        |
| `gcs kill`        | kill -9 of the GCS of serve's own Ray           | another one comes                    |
| `raylet kill`     | the same of its raylet, and so of its nodes     | another one comes                    |
| `redis kill`      | kill -9; an empty one comes at its address      | routers that heard nothing of Redis  |
| `redis stop`      | SIGSTOP                                         | the same                             |
| `redis cut off`   | nothing reaches it, on no connection, old or new | the same, and packets refused       |
| `redis slow`      | SIGSTOP and SIGCONT in turn                     | what an answer took                  |
| `redis read-only` | it takes no writes                              | the writes that it refused           |
| `redis full`      | it has no memory for writes                     | the same                             |
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import redis

from cluster.state.holder import read_holder
from cluster.state.published import read_published
from tests.chaos.faults import ATTEMPTS, Fault, Node, NothingThere, Planned, is_gone, isolate, kill, stop
from tests.chaos.front import Front
from tests.chaos.load import Served
from tests.fakes.redis_servers import Embedded

ROUTER_KINDS = ("router kill", "router stop", "router cut off")
SUPERVISOR_KINDS = ("supervisor kill", "supervisor stop")
SUPERVISOR_AWAY_S = 6.0  # longer than its lease, and than another one takes to take over
TAKEN_OVER_S = 45.0  # until another one supervises, all nodes being there again
RAY_KINDS = ("gcs kill", "raylet kill")  # of a private one
RAY_BACK_S = 45.0  # until there is another one, of whichever process was killed
REDIS_KINDS = ("redis kill", "redis stop", "redis cut off", "redis slow", "redis read-only", "redis full")
CUT_KINDS = ("router cut off", "redis cut off")  # not to be done where nobody may touch another process's sockets
AWAY_S = (2.5, 4.0)  # longer than it takes to be noticed
REDIS_AWAY_S = (1.0, 4.0)  # shorter and longer than a lease
TURN_S = (0.25, 0.05)  # of a slow Redis: stopped, let go on
SLOW_S = 0.1  # an answer that takes so long is slow
ASK_EVERY_S = 0.05
STALE_S = 0.4  # routers look every 0.2 s
MOVED_S = 6.0  # for the streams of a router to be seen elsewhere
DEPLOYMENT = "default"
BUSY_S = 20.0  # for a router to have streams


@dataclass
class FrontInjector:
    """Does what was planned, one fault after the other. ``streams``: those under way."""

    front: Front
    redis: Embedded
    streams: Callable[[], list[Served]]
    nodes: Callable[[], list[Node]]  # that the routers have; blocks
    faults: list[Fault] = field(default_factory=list)
    on: dict[int, list[Served]] = field(default_factory=dict)  # by the fault's number: the streams that it met
    starts_s: list[float] = field(default_factory=list)  # of routers that came back

    async def run(self, planned: list[Planned], origin: float) -> None:
        """Each at its time after ``origin`` (monotonic clock), or later when the last one took longer."""
        for one in planned:
            await asyncio.sleep(max(0.0, origin + one.at_s - time.monotonic()))
            await self._inject(one)

    async def _inject(self, planned: Planned) -> None:
        """Try until it hurts; the last try is kept with its problem when it did not."""
        for attempt in range(1, ATTEMPTS + 1):
            fault = Fault(planned.kind, ("redis",), True, time.time())
            self.faults.append(fault)
            try:
                fault.proof = await self._do(planned, fault)
            except (AssertionError, NothingThere) as error:
                fault.problem = f"did not bite: {error}"
            fault.until = time.time()
            print(f"  {fault} {fault.problem}", flush=True)
            if not fault.problem:
                return
            if attempt < ATTEMPTS:
                self.faults.remove(fault)

    async def _do(self, planned: Planned, fault: Fault) -> str:
        if planned.kind in SUPERVISOR_KINDS:
            return await self._hurt_supervisor(planned, fault)
        if planned.kind in ROUTER_KINDS:
            return await self._hurt_router(planned, fault)
        if planned.kind in RAY_KINDS:
            return await self._hurt_ray(planned, fault)
        low, high = REDIS_AWAY_S
        held_s = low + planned.hold * (high - low)
        match planned.kind:
            case "redis kill":
                return await self._unheard(self._redis_killed(held_s))
            case "redis stop":
                return await self._unheard(stop(self.redis.pid, held_s))
            case "redis cut off":
                return await self._unheard(isolate(self.redis.pid, held_s))
            case "redis slow":
                return await self._slow(held_s)
            case "redis read-only":
                return await self._refusing("min-replicas-to-write", "1", "0", "NOREPLICAS", held_s)
            case "redis full":
                return await self._refusing("maxmemory", "1", "64mb", "OOM", held_s)
        raise ValueError(planned.kind)

    # -- routers -----------------------------------------------------------------------------------------------

    async def _hurt_router(self, planned: Planned, fault: Fault) -> str:
        name = await self._busy(planned)
        pid = self.front.routers[name].process.pid
        fault.victims, fault.at = (name,), time.time()
        met = [served for served in self.streams() if served.at() == name]
        self.on[id(fault)] = met
        held_s = AWAY_S[0] + planned.hold * (AWAY_S[1] - AWAY_S[0])
        match planned.kind:
            case "router kill":
                proof = await kill(pid)
                self.starts_s.append(await self.front.start_again(name))
            case "router stop":
                proof = await stop(pid, held_s)
            case _:
                proof = await isolate(pid, held_s)
        end = time.monotonic() + MOVED_S
        while not (moved := sum(_left(served, name, fault.at) for served in met)):
            if time.monotonic() > end:
                raise NothingThere(f"none of {len(met)} streams left it")
            await asyncio.sleep(0.05)
        return f"{proof}; {moved} of {len(met)} streams left it"

    async def _hurt_supervisor(self, planned: Planned, fault: Fault) -> str:
        name, end = "", time.monotonic() + TAKEN_OVER_S
        while not (name := await self._supervisor()):  # the fault before this one may still be felt
            if time.monotonic() > end:
                raise NothingThere("nobody supervises")
            await asyncio.sleep(0.1)
        fault.at = time.time()
        pid = self.front.routers[name].process.pid
        fault.victims, fault.at = (name,), time.time()
        self.on[id(fault)] = [served for served in self.streams() if served.at() == name]
        kills = planned.kind == "supervisor kill"
        hurting = asyncio.create_task(kill(pid) if kills else stop(pid, SUPERVISOR_AWAY_S))
        try:
            async with asyncio.timeout(TAKEN_OVER_S):
                while (now := await self._supervisor()) in ("", name):
                    await asyncio.sleep(0.1)
                took_s = time.time() - fault.at
                while not await self._published():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"nobody took over within {TAKEN_OVER_S:g} s") from None
        finally:
            proof = await hurting
            if kills:
                self.starts_s.append(await self.front.start_again(name))
        return f"{proof}; {now} supervises after {took_s:.1f} s"

    async def _supervisor(self) -> str:
        """The router that supervises; empty where none does, or Redis is away."""
        try:
            holder = await asyncio.to_thread(read_holder, self.redis.url, DEPLOYMENT)
        except redis.RedisError:
            return ""
        return "" if holder is None else self.front.name_of(holder.pid)

    async def _published(self) -> bool:
        """Whether a supervisor has said what it serves; no where Redis is away, which another fault may hurt."""
        try:
            return await asyncio.to_thread(read_published, self.redis.url, DEPLOYMENT) is not None
        except redis.RedisError:
            return False

    async def _busy(self, planned: Planned) -> str:
        """A router with streams. NothingThere when none has any for long."""
        kept = {await self._supervisor(), "" if self.front.ray_pid else "serve"}  # whose nodes would end with it
        names = [name for name in self.front.routers if planned.kind != "router kill" or name not in kept]
        first = random.Random(planned.draw).sample(names, len(names))
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            busy = {served.at() for served in self.streams() if served.arrivals}
            if found := [name for name in first if name in busy]:
                return found[0]
            await asyncio.sleep(0.05)
        raise NothingThere("no router has streams")

    # -- Ray ---------------------------------------------------------------------------------------------------

    async def _hurt_ray(self, planned: Planned, fault: Fault) -> str:
        name = "gcs_server" if planned.kind == "gcs kill" else "raylet"
        fault.victims, before = ("ray",), self._rays(name)
        nodes = await asyncio.to_thread(self.nodes)
        if not before:
            raise NothingThere(f"there is no {name} now")
        victim = max(before, key=lambda one: one.create_time())
        fault.at = time.time()
        if not (met := [served for served in self.streams() if served.arrivals]):
            raise NothingThere("nobody streams")
        proof = await kill(victim.pid)
        end = time.monotonic() + RAY_BACK_S
        while not set(self._rays(name)) - set(before):
            assert time.monotonic() < end, f"there is no other {name} after {RAY_BACK_S:g} s"
            await asyncio.sleep(0.1)
        gone = [node.id for node in nodes if is_gone(node.pid)]
        took_s = time.time() - fault.at
        return f"{proof} under {len(met)} streams; another one came after {took_s:.1f} s, nodes gone: {gone}"

    def _rays(self, name: str) -> list[psutil.Process]:
        """Those of Ray's processes below ``serve`` that live."""
        found = psutil.Process(self.front.main.process.pid).children()
        return [one for one in found if one.name() == name and not is_gone(one.pid)]

    # -- Redis -------------------------------------------------------------------------------------------------

    async def _redis_killed(self, held_s: float) -> str:
        pid = self.redis.pid
        await asyncio.to_thread(self.redis.kill)
        assert is_gone(pid)
        await asyncio.sleep(held_s)
        await asyncio.to_thread(self.redis.start_again)
        return f"process {pid} is gone, an empty one came"

    async def _unheard(self, doing: Coroutine[Any, Any, str]) -> str:
        """What was done, and for how long at most routers say that they heard nothing."""
        task = asyncio.create_task(doing)
        stale_s = 0.0
        while not task.done():
            stale_s = max([stale_s, *await asyncio.gather(*map(_stale_s, self.front.http.values()))])
            await asyncio.sleep(0.1)
        if stale_s < STALE_S:
            raise NothingThere(f"routers heard from Redis {stale_s:.1f} s ago")
        return f"{task.result()}; a router did not hear from it for {stale_s:.1f} s"

    async def _slow(self, held_s: float) -> str:
        process, took = psutil.Process(self.redis.pid), list[float]()
        asking = asyncio.create_task(self._ask_on(took))
        end = time.monotonic() + held_s
        try:
            while time.monotonic() < end:
                for number, wait_s in zip((signal.SIGSTOP, signal.SIGCONT), TURN_S, strict=True):
                    process.send_signal(number)
                    await asyncio.sleep(wait_s)
        finally:
            process.send_signal(signal.SIGCONT)
            asking.cancel()
        slow = sum(one >= SLOW_S for one in took)
        if not took or slow < len(took) / 2:
            raise NothingThere(f"{slow} of {len(took)} answers were slow")
        return (
            f"{slow} of {len(took)} answers took longer than {SLOW_S} s, {statistics.median(took):.2f} s at the median"
        )

    async def _ask_on(self, took: list[float]) -> None:
        with redis.Redis.from_url(self.redis.url) as client:
            while True:
                began = time.monotonic()
                await asyncio.to_thread(client.ping)
                took.append(time.monotonic() - began)
                await asyncio.sleep(ASK_EVERY_S)

    async def _refusing(self, option: str, value: str, before: str, code: str, held_s: float) -> str:
        with redis.Redis.from_url(self.redis.url, decode_responses=True) as client:
            client.config_set(option, value)
            client.config_resetstat()
            try:
                await asyncio.sleep(held_s)
                refused = client.info("errorstats").get(f"errorstat_{code}", {"count": 0})["count"]
            finally:
                client.config_set(option, before)
        if not refused:
            raise NothingThere("no write was refused")
        return f"{refused} writes refused with {code}"


def _left(served: Served, router: str, since: float) -> bool:
    """Whether a stream left a router: it went on elsewhere, or asks there now."""
    return served.at() != router or any(move.source == router and move.first > since for move in served.moves)


async def _stale_s(address: str) -> float:
    """For how long a router has not heard from Redis; 0 where it does not say."""
    try:
        async with httpx.AsyncClient(timeout=1.0) as client:
            text = (await client.get(f"http://{address}/metrics")).text
    except httpx.HTTPError:
        return 0.0
    lines = [line for line in text.splitlines() if line.startswith("paceline_registry_stale_seconds ")]
    return float(lines[0].split()[1]) if lines else 0.0
