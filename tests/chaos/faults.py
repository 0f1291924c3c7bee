"""Faults on the nodes of a running deployment, each shown to have happened.

| kind      | what is done                                                       | shown by                     |
|-----------|--------------------------------------------------------------------|------------------------------|
| `kill`    | kill -9 of a node                                                  | its process is gone          |
| `rank`    | kill -9 of one rank of a node, rank 0 or a follower                | all its processes are gone   |
| `pause`   | SIGSTOP of a node, SIGCONT before its lease is lost                | state T                      |
| `stop`    | SIGSTOP of a node, SIGCONT when it was replaced, or late           | state T                      |
| `reset`   | every connection of a prefill and a decode node is shut down       | none is established any more |
| `silence` | nothing crosses between a prefill and a decode node; none is told  | packets that were refused    |
| `cut off` | nothing crosses between the router and a node; none is told           | the same                     |

While a pair is silent nobody new can connect to either of the two; their other connections work.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tests.chaos.sockets import Held, Taken, between, held_by, listeners

PROCESS_KINDS, LINK_KINDS = ("kill", "pause", "stop"), ("reset", "silence", "cut off")
RANK_KIND = "rank"  # of nodes of several ranks
PAUSE_S = (0.3, 1.2)  # within a lease of 2 s
STOP_S = 12.0  # at most, for one that is not replaced
SILENCE_S = (2.5, 4.0)  # longer than it takes to be noticed
RESCAN_S = 0.05
DEATH_TIMEOUT_S = 5.0
NODE_DEATH_TIMEOUT_S = 20.0  # from the death of a follower to the end of its node, on a machine that is busy
QUIET_S = 10.0  # that a silence may go on for until something is refused
ATTEMPTS = 3  # to find somebody whom a fault hits
DRAWN_S = 4.0  # for the one that was drawn to have work: prefill nodes have none most of the time
VICTIM_TIMEOUT_S = 45.0  # until nodes are there that no other fault has, with a link where one is to be cut: one is
# away for a stop and its start, and may be hurt again

Key = tuple[int, tuple[str, int], tuple[str, int] | None]  # of a socket: process, own address, the peer's


@dataclass(frozen=True)
class Planned:
    """When what is to happen. ``draw``: 0 to 1, picks the victim among the nodes that are there."""

    at_s: float
    kind: str
    draw: float
    hold: float  # 0 to 1, of the kind's range


def kinds() -> tuple[str, ...]:
    """Those that can be done here: some containers let nobody touch another process's sockets."""
    try:
        with socket.socket() as own:
            Taken(os.getpid(), own.fileno()).close()
    except OSError as error:
        print(f"  links cannot be cut here: {error}")
        return PROCESS_KINDS
    return PROCESS_KINDS + LINK_KINDS


def plan(kinds: Sequence[str], seed: int, seconds: float, gap_s: tuple[float, float]) -> list[Planned]:
    """Every kind in turn, in an order that changes from turn to turn."""
    rng = random.Random(seed)
    planned: list[Planned] = []
    at, turn = gap_s[0], list[str]()
    while at < seconds:
        turn = turn or rng.sample(kinds, len(kinds))
        planned.append(Planned(at, turn.pop(), rng.random(), rng.random()))
        at += rng.uniform(*gap_s)
    return planned


@dataclass(frozen=True)
class Node:
    """A node that the router has."""

    id: str
    role: str
    pid: int
    address: str = ""


@dataclass
class Fault:
    """One that was done. Times are Unix time."""

    kind: str
    victims: tuple[str, ...]
    spare: bool  # another node of each role was there and whole
    at: float
    until: float = 0.0
    proof: str = ""
    problem: str = ""

    def __str__(self) -> str:
        spare = "with a spare" if self.spare else "no spare"
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"{at} {self.kind} of {' - '.join(self.victims)}, {spare}, {self.until - self.at:.1f} s: {self.proof}"


class NothingThere(Exception):
    """Nobody spoke where a fault was: it is not one, and is done again."""


@dataclass
class Injector:
    """Does what was planned. ``view``: the nodes that the routers have; blocks. ``works``: whether a node has anything
    to do, without which a fault of it alone would hurt nobody."""

    router_pids: Callable[[], list[int]]
    view: Callable[[], list[Node]]
    works: Callable[[Node], Awaitable[bool]]
    faults: list[Fault] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _hurt: Counter[str] = field(default_factory=Counter)  # node ids under a fault now

    async def run(self, planned: Iterable[Planned], origin: float) -> None:
        """Each fault at its time after ``origin`` (monotonic clock), whether or not the last one is over."""
        async with asyncio.TaskGroup() as group:
            for one in planned:
                await asyncio.sleep(max(0.0, origin + one.at_s - time.monotonic()))
                group.create_task(self._inject(one))

    async def _inject(self, planned: Planned) -> None:
        for _ in range(ATTEMPTS):
            found = await self._victims(planned)
            if found is None:
                break
            if await self._hurts(planned, *found):
                return
        self.skipped[planned.kind] += 1

    async def _hurts(self, planned: Planned, nodes: list[Node], chosen: list[Node]) -> bool:
        """Do it to ``chosen``; False when nothing was there to be hit."""
        roles, victims = Counter(node.role for node in nodes), tuple(node.id for node in chosen)
        fault = Fault(planned.kind, victims, all(roles[node.role] > 1 for node in chosen), time.time())
        self.faults.append(fault)
        self._hurt.update(victims)
        try:
            fault.proof = await self._do(planned, chosen)
        except NothingThere as quiet:
            self.faults.remove(fault)
            fault.proof = str(quiet)
        except psutil.NoSuchProcess:
            self.faults.remove(fault)
            fault.proof = "another fault ended it meanwhile"
        except AssertionError as error:
            fault.problem = str(error)
        finally:
            fault.until = time.time()
            self._hurt.subtract(victims)
        print(f"  {fault} {fault.problem}", flush=True)
        return fault in self.faults

    async def _victims(self, planned: Planned) -> tuple[list[Node], list[Node]] | None:
        """(nodes that are there and whole, those of them to hurt); None where nobody is to be found for long."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < VICTIM_TIMEOUT_S:
            there = [node for node in await asyncio.to_thread(self.view) if not is_gone(node.pid)]
            candidates = _candidates(planned, [node for node in there if not self._hurt[node.id]])
            for chosen in candidates if waited_s > DRAWN_S else candidates[:1]:
                if await asyncio.to_thread(connected, chosen) and await self._works(planned, chosen[0]):
                    whole = [node for node in there if not self._hurt[node.id]]
                    if all(node in whole for node in chosen):
                        return whole, chosen
            await asyncio.sleep(RESCAN_S)
        return None

    async def _works(self, planned: Planned, node: Node) -> bool:
        return planned.kind not in (*PROCESS_KINDS, RANK_KIND) or await self.works(node)

    async def _do(self, planned: Planned, nodes: list[Node]) -> str:
        match planned.kind:
            case "kill":
                return await kill(nodes[0].pid)
            case "rank":
                return await kill_rank(nodes[0].pid, planned.hold)
            case "pause":
                return await stop(nodes[0].pid, _within(PAUSE_S, planned.hold))
            case "stop":
                return await stop(nodes[0].pid, STOP_S)
            case "reset":
                return await reset(nodes[0].pid, nodes[1].pid)
            case "silence":
                return await silence(nodes[0].pid, nodes[1].pid, _within(SILENCE_S, planned.hold), both_listen=True)
            case "cut off":
                held_s, routers = _within(SILENCE_S, planned.hold), self.router_pids()
                router = routers[int(planned.draw * 97) % len(routers)]
                return await silence(nodes[0].pid, router, held_s, both_listen=False)
        raise ValueError(planned.kind)


def _candidates(planned: Planned, nodes: list[Node]) -> list[list[Node]]:
    """Who may be the victim, the drawn one first: a node, or a prefill and a decode node."""
    of_one = planned.kind not in ("reset", "silence")
    pairs = [[p, d] for p in nodes if p.role == "prefill" for d in nodes if d.role == "decode"]
    all_of_them = [[node] for node in nodes] if of_one else pairs
    first = int(planned.draw * len(all_of_them))
    return all_of_them[first:] + all_of_them[:first]


def _within(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + share * (bounds[1] - bounds[0])


def is_gone(pid: int) -> bool:
    """It ended; whoever started it may not have looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def kill(pid: int) -> str:
    """kill -9."""
    psutil.Process(pid).kill()
    end = time.monotonic() + DEATH_TIMEOUT_S
    while not is_gone(pid):
        assert time.monotonic() < end, f"process {pid} outlived kill -9"
        await asyncio.sleep(0.01)
    return f"process {pid} is gone"


def followers_of(pid: int) -> list[psutil.Process]:
    """The followers of the node whose rank 0 is process ``pid``."""
    try:
        return [one for one in psutil.Process(pid).children() if "paceline.ranks.process" in one.cmdline()]
    except psutil.NoSuchProcess:
        return []


async def kill_rank(pid: int, draw: float) -> str:
    """kill -9 of the rank that ``draw`` says, 0 to 1; the node whose rank 0 is process ``pid`` goes with it."""
    followers = await asyncio.to_thread(followers_of, pid)
    if not followers:
        raise NothingThere(f"process {pid} has no followers any more")
    ranks = [pid, *(follower.pid for follower in followers)]
    rank = int(draw * len(ranks))
    await kill(ranks[rank])
    end = time.monotonic() + NODE_DEATH_TIMEOUT_S
    while left := [one for one in ranks if not is_gone(one)]:
        assert time.monotonic() < end, f"processes {left} outlived rank {rank} of their node"
        await asyncio.sleep(0.05)
    return f"rank {rank} of {len(ranks)} was killed, and all of them are gone"


async def stop(pid: int, most_s: float) -> str:
    """SIGSTOP; SIGCONT after ``most_s``, or when the process is gone."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + most_s
    try:
        stopped_by = time.monotonic() + DEATH_TIMEOUT_S
        while (state := process.status()) != psutil.STATUS_STOPPED:  # each of its threads stops once it is scheduled
            assert time.monotonic() < stopped_by, f"process {pid} is {state} after SIGSTOP"
            await asyncio.sleep(0.01)
        while time.monotonic() < end and not is_gone(pid):
            await asyncio.sleep(0.02)
        replaced = is_gone(pid)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    return f"process {pid} was in state T until it was {'killed' if replaced else 'let go on'}"


def connected(nodes: list[Node]) -> bool:
    """Whether two nodes have a connection: links are opened when they are needed. One node always is."""
    return len(nodes) == 1 or bool(between(nodes[0].pid, nodes[1].pid))


async def reset(one: int, two: int) -> str:
    """Shut down every connection between two processes."""
    ends = await asyncio.to_thread(lambda: _taken(between(one, two)))
    try:
        before = sum(end.established() for _, end in ends)
        if not before:
            raise NothingThere(f"processes {one} and {two} have no connection any more")
        for _, end in ends:
            end.cut()
        left = sum(end.established() for _, end in ends)
        assert not left, f"{left} of {before} connections are still established"
    finally:
        for _, end in ends:
            end.close()
    return f"{before} ends of connections shut down"


async def silence(one: int, two: int, held_s: float, both_listen: bool) -> str:
    """Let nothing cross between two processes for a while, and until somebody tried (a link that was just rebuilt may
    be quiet). both_listen: the second one's listeners are closed too."""
    closed = (one, two) if both_listen else (one,)
    return await _refuse(lambda: between(one, two) + listeners(closed), held_s)


async def isolate(pid: int, held_s: float) -> str:
    """Let nothing reach a process for a while, whoever sends it, and until somebody tried."""
    return await _refuse(lambda: held_by(pid), held_s)


async def _refuse(sockets: Callable[[], list[Held]], held_s: float) -> str:
    """Let nothing in at sockets, of which there may be others at any moment."""
    taken: dict[Key, Taken] = {}
    before, refused, end = 0, 0, time.monotonic() + held_s
    try:
        while (now := time.monotonic()) < end or (not refused and now < end + QUIET_S):
            found = await asyncio.to_thread(sockets)
            fresh = [held for held in found if _key(held) not in taken]
            for held, one_end in await asyncio.to_thread(_taken, fresh):
                before += one_end.refused()
                one_end.silence()
                taken[_key(held)] = one_end
            await asyncio.sleep(RESCAN_S)
            refused = sum(one_end.refused() for one_end in taken.values()) - before
    finally:
        for one_end in taken.values():
            one_end.unsilence()
            one_end.close()
    if not refused:
        raise NothingThere(f"no packet came in on {len(taken)} sockets")
    return f"{refused} packets refused on {len(taken)} sockets"


def _key(held: Held) -> Key:
    return held.pid, held.local, held.remote


def _taken(sockets: Iterable[Held]) -> list[tuple[Held, Taken]]:
    """Those that are still there."""
    found = []
    for held in sockets:
        with suppress(OSError):
            found.append((held, Taken(held.pid, held.fd)))
    return found
