"""Nodes, leases, view and supervisor together, in one process, on a real Redis that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
import redis

from cluster.nodes import supervise
from cluster.nodes.slots import NodeEvent
from cluster.nodes.supervise import Supervisor
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.holder import DeploymentLease, Holder
from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import NodeRecord

TTL_S = 0.4
DOUBT_S = 0.3
WITHIN_S = 10.0


@dataclass
class Node:
    """A node's process side: its lease, and whether its engine loop ticks."""

    keeper: LeaseKeeper
    ticks: threading.Event
    dead: bool = False
    killed: bool = False

    def start(self) -> str:
        self.keeper.start()
        return "127.0.0.1:1"

    def died(self) -> bool:
        return self.dead

    async def answers(self) -> bool:
        return self.ticks.is_set() and not self.dead

    def stop(self, grace_s: float) -> None:
        self.keeper.close()

    def kill(self) -> None:
        self.killed = True
        self.keeper.close()

    def die(self) -> None:
        """As by kill -9: the record stays."""
        self.keeper._stop.set()
        self.dead = True


@dataclass
class Case:
    """Two prefill and two decode nodes."""

    server: EmbeddedRedis
    directory: NodeDirectory
    lease: DeploymentLease
    supervisor: Supervisor = field(init=False)
    nodes: dict[tuple[str, int], Node] = field(default_factory=dict)
    events: list[NodeEvent] = field(default_factory=list)

    def launch(self, role: str, node_id: str, generation: int) -> Node:
        ticks = threading.Event()
        ticks.set()
        record = NodeRecord(node_id, role, generation, "127.0.0.1:1", model="m", fingerprint_digest="d")
        keeper = LeaseKeeper(self.server.url, record, TTL_S, ticks.is_set, dict)
        node = self.nodes[node_id, generation] = Node(keeper, ticks)
        return node

    @property
    def routed(self) -> list[tuple[str, int]]:
        return [(node.id, node.generation) for node in self.directory.nodes()]

    def killed(self) -> list[tuple[str, int]]:
        return [key for key, node in self.nodes.items() if node.killed]


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(supervise, "LEASE_GRACE_S", 0.4)
    monkeypatch.setattr(supervise, "ASK_KEPT_AFTER_S", 0.2)
    server = EmbeddedRedis()
    server.keep_running()
    directory = NodeDirectory(server.url, TTL_S, doubt_s=DOUBT_S)
    made = Case(server, directory, DeploymentLease(server.url, "default", Holder("m"), lambda who: None))
    made.lease.acquire()
    told = (directory.holds, directory.heard, directory.ended)
    made.supervisor = Supervisor(made.launch, made.events.append, made.lease.issue, *told)
    made.supervisor.want("prefill", 2)
    made.supervisor.want("decode", 2)
    await directory.start()
    await made.supervisor.start()
    await directory.refresh()
    yield made
    await made.supervisor.stop(0.0)
    await directory.close()
    made.lease.release()
    server.close()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


ALL = [(f"{role}-{number}", 1) for role in ("decode", "prefill") for number in range(2)]


def no_room(client: redis.Redis) -> Callable[[], object]:
    client.config_set("maxmemory", "1")
    return lambda: client.config_set("maxmemory", "64mb")


def read_only(client: redis.Redis) -> Callable[[], object]:
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")


async def test_a_node_whose_process_has_ended_is_gone_though_redis_is(case: Case) -> None:
    """Load balancers hear at once where nobody can serve. Mutants: it stays until Redis answers, or until the lease
    that it left there ends; the next generation is held back too."""
    seen: list[list[tuple[str, int]]] = []
    os.kill(case.server.pid, signal.SIGSTOP)
    try:
        case.nodes["decode-0", 1].die()
        await until(lambda: ("decode-0", 1) not in case.routed)
        assert case.routed == [key for key in ALL if key[0] != "decode-0"]
        case.directory.on_change(lambda nodes: seen.append(case.routed))
    finally:
        os.kill(case.server.pid, signal.SIGCONT)
    await until(lambda: ("decode-0", 2) in case.routed)
    assert not any(("decode-0", 1) in view for view in seen)


@pytest.mark.parametrize("fault", [no_room, read_only])
async def test_a_redis_that_takes_no_writes_costs_no_node(
    case: Case, fault: Callable[[redis.Redis], Callable[[], object]]
) -> None:
    """Routed to all the while; but a node that is wedged in that time loses its place."""
    assert case.routed == ALL
    views: list[list[tuple[str, int]]] = []
    case.directory.on_change(lambda nodes: views.append([(node.id, node.generation) for node in nodes]))
    with redis.Redis.from_url(case.server.url) as client:
        heal = fault(client)
        with pytest.raises(redis.ResponseError):
            client.set("key", "value")
        await until(lambda: sum(event.kind == "kept" for event in case.events) == 4)
        await asyncio.sleep(4 * TTL_S)
        assert (case.routed, case.killed(), views) == (ALL, [], [])
        assert sum(event.kind == "kept" for event in case.events) == 4  # told once
        case.nodes["decode-1", 1].ticks.clear()
        await until(lambda: ("decode-1", 1) not in case.routed)
        await until(lambda: bool(case.killed()))
        assert case.killed() == [("decode-1", 1)]
        heal()
    await until(lambda: case.routed == [("decode-0", 1), ("decode-1", 2), *ALL[2:]])
    await asyncio.sleep(2 * TTL_S)
    assert case.killed() == [("decode-1", 1)]


async def test_redis_dies_then_a_node(case: Case) -> None:
    """With generations by the time of day, or a Redis that stays away, the node would not come back."""
    os.kill(case.server.pid, signal.SIGKILL)
    case.nodes["decode-0", 1].die()
    await until(lambda: case.routed == [("decode-0", 2), *ALL[1:]])
    assert case.killed() == [("decode-0", 1)]  # what may be left of it


async def test_nodes_that_serve_something_else_are_not_used(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.directory.show_only([("m", "d")])
    others = [("decode-7", "other", "d"), ("decode-8", "m", "other"), ("decode-9", "m", "d")]
    keepers = [
        LeaseKeeper(
            case.server.url,
            NodeRecord(node_id, "decode", 1, "127.0.0.1:1", model=model, fingerprint_digest=digest),
            TTL_S,
            lambda: True,
            dict,
        )
        for node_id, model, digest in others
    ]
    for keeper in keepers:
        keeper.start()
    await until(lambda: ("decode-9", 1) in case.routed)
    await asyncio.sleep(2 * TTL_S)
    assert case.routed == [*ALL[:2], ("decode-9", 1), *ALL[2:]]
    told = [record.message.split()[0] for record in caplog.records if "not this deployment's" in record.message]
    assert told == ["decode-7", "decode-8"]
    for keeper in keepers:
        keeper.close()
