"""Leases on a real server: who is seen, for how long, and who may not come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from cluster.state.connection import JOIN_TIMEOUT_S
from cluster.state.node_lease import Fenced, LeaseKeeper
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import DEFAULT_NAMESPACE, NodeRecord, namespace_of
from tests.fakes.redis_servers import SERVERS, Server

TTL_S = 0.4
PATIENT_TTL_S = 10.0  # of leases that must not run out, whatever pauses
SLACK_S = 5.0  # of a busy machine
HOLDER = Path(__file__).with_name("lease_holder.py")
LOAD = {"running": 1, "waiting": 2, "free_pages": 3, "total_pages": 4}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = SERVERS[request.param]()
    yield made
    made.close()


@pytest.fixture
async def directory(server: Server) -> AsyncIterator[NodeDirectory]:
    made = NodeDirectory(server.url, TTL_S)
    await made.start()
    yield made
    await made.close()


class Keepers:
    """Makes lease keepers in this process; closes them all."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.made: list[LeaseKeeper] = []

    def make(
        self,
        node_id: str,
        generation: int = 1,
        alive: Callable[[], bool] = lambda: True,
        on_fenced: Callable[[], None] = lambda: None,
        namespace: str = DEFAULT_NAMESPACE,
        ttl_s: float = TTL_S,
    ) -> LeaseKeeper:
        record = NodeRecord(node_id, node_id.split("-")[0], generation, "127.0.0.1:1")
        keeper = LeaseKeeper(self.url, record, ttl_s, alive, lambda: LOAD, namespace, on_fenced)
        self.made.append(keeper)
        return keeper

    def start(self, node_id: str, generation: int = 1, **options: Any) -> LeaseKeeper:
        keeper = self.make(node_id, generation, **options)
        keeper.start()
        return keeper


@pytest.fixture
def keepers(server: Server) -> Iterator[Keepers]:
    made = Keepers(server.url)
    yield made
    for keeper in made.made:
        keeper.close()


class Holder:
    """A process that holds a lease."""

    def __init__(self, url: str, node_id: str, generation: int) -> None:
        command = [sys.executable, str(HOLDER), url, node_id, str(generation), str(TTL_S)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def holder(server: Server) -> Iterator[Holder]:
    made = Holder(server.url, "decode-0", 1)
    yield made
    made.end()


async def until(condition: Callable[[], bool], within_s: float = TTL_S + TTL_S / 4 + SLACK_S) -> float:
    """Seconds until ``condition`` held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s:.2f} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def ids(directory: NodeDirectory) -> list[str]:
    return [node.id for node in directory.nodes()]


async def test_a_node_is_seen_with_all_it_says_until_it_leaves(
    server: Server, directory: NodeDirectory, keepers: Keepers
) -> None:
    record = NodeRecord("decode-0", "decode", 3, "10.0.0.1:5", "ready", 42, "host", 1.5, "model", "digest")
    keeper = LeaseKeeper(server.url, record, TTL_S, lambda: True, lambda: LOAD)
    keepers.made.append(keeper)
    keeper.start()
    await until(lambda: bool(directory.nodes()))
    assert directory.nodes() == [NodeRecord(**{**vars(record), **LOAD})]
    assert directory.holds("decode-0", 3)
    assert not directory.holds("decode-0", 2)
    assert not directory.holds("decode-1", 3)
    assert directory.record("decode-0", 3) == directory.nodes()[0]
    assert directory.record("decode-0", 2) is None
    await asyncio.sleep(2 * TTL_S)
    await until(lambda: ids(directory) == ["decode-0"])  # renewed all the while
    keeper.drain()
    await until(lambda: [node.state for node in directory.nodes()] == ["draining"], TTL_S / 4 + SLACK_S)
    keeper.close()
    keeper.close()
    await directory.refresh()
    assert directory.nodes() == []
    with redis.Redis.from_url(server.url) as client:
        assert client.hgetall("paceline:default:nodes") == client.hgetall("paceline:default:leases") == {}


async def test_listeners_hear_of_joins_drains_and_leaves_only(directory: NodeDirectory, keepers: Keepers) -> None:
    heard: list[list[tuple[str, str]]] = []

    def broken(nodes: list[NodeRecord]) -> None:
        raise RuntimeError("a listener's fault")

    directory.on_change(broken)
    directory.on_change(lambda nodes: heard.append([(node.id, node.state) for node in nodes]))
    first = keepers.start("prefill-0", ttl_s=PATIENT_TTL_S)
    await until(lambda: len(heard) == 1)
    second = keepers.start("decode-0", ttl_s=PATIENT_TTL_S)
    await until(lambda: len(heard) == 2)
    first.drain()
    await until(lambda: len(heard) == 3)
    first.close()
    await until(lambda: len(heard) == 4)
    for _ in range(3):
        second.write()  # as its heartbeat does
        await asyncio.sleep(TTL_S / 4)
    assert heard == [
        [("prefill-0", "ready")],
        [("decode-0", "ready"), ("prefill-0", "ready")],
        [("decode-0", "ready"), ("prefill-0", "draining")],
        [("decode-0", "ready")],
    ]


async def test_a_drain_is_told_at_once(server: Server, keepers: Keepers) -> None:
    """Not with the next heartbeat: routers would send work until then."""
    keeper = keepers.start("decode-0", ttl_s=60.0)
    keeper.drain()
    with redis.Redis.from_url(server.url) as client:
        record = client.hget("paceline:default:nodes", "decode-0")
    assert record is not None
    assert json.loads(record)["state"] == "draining"


async def test_an_engine_that_does_not_tick_loses_its_lease(directory: NodeDirectory, keepers: Keepers) -> None:
    ticks = {"decode-0": True, "decode-1": True}

    def raising() -> bool:
        if not ticks["decode-1"]:
            raise RuntimeError("the engine is gone")
        return True

    keepers.start("decode-0", alive=lambda: ticks["decode-0"])
    keepers.start("decode-1", alive=raising)
    await until(lambda: len(directory.nodes()) == 2)
    ticks.update({"decode-0": False, "decode-1": False})
    await until(lambda: directory.nodes() == [])
    assert ids(directory) == []
    ticks.update({"decode-0": True, "decode-1": True})
    await until(lambda: len(directory.nodes()) == 2)
    assert ids(directory) == ["decode-0", "decode-1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_process_loses_its_lease(
    server: Server, directory: NodeDirectory, holder: Holder, number: signal.Signals
) -> None:
    await until(lambda: ids(directory) == ["decode-0"])
    holder.process.send_signal(number)
    with redis.Redis.from_url(server.url) as client:
        lease_ends_ms = int(client.hget("paceline:default:leases", "decode-0"))
        await until(lambda: directory.nodes() == [])
        seconds, microseconds = client.time()
    assert seconds * 1000 + microseconds / 1000 >= lease_ends_ms  # by the lease, not by anything sooner
    if number is signal.SIGSTOP:  # no successor came: it may go on
        holder.process.send_signal(signal.SIGCONT)
        await until(lambda: ids(directory) == ["decode-0"])


async def test_a_zombie_cannot_come_back_over_its_successor(
    directory: NodeDirectory, holder: Holder, keepers: Keepers
) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    await until(lambda: directory.nodes() == [])
    keepers.start("decode-0", generation=2, ttl_s=PATIENT_TTL_S)
    await until(lambda: directory.holds("decode-0", 2))
    holder.process.send_signal(signal.SIGCONT)
    assert await asyncio.wait_for(asyncio.to_thread(holder.line), TTL_S + SLACK_S) == "fenced"
    await directory.refresh()
    assert directory.holds("decode-0", 2)


async def test_lower_generations_are_refused_and_remove_nothing(directory: NodeDirectory, keepers: Keepers) -> None:
    fenced: list[int] = []
    old = keepers.make("decode-0", 1, on_fenced=lambda: fenced.append(1))
    old.start()
    new = keepers.start("decode-0", 2, ttl_s=PATIENT_TTL_S)
    await until(lambda: fenced == [1])
    assert old.fenced
    old.close()
    with pytest.raises(Fenced, match="decode-0: a generation above 1"):
        keepers.start("decode-0", 1)
    await directory.refresh()
    assert directory.holds("decode-0", 2)
    new.close()
    with pytest.raises(Fenced):  # the fence outlives the record
        keepers.start("decode-0", 1)
    await directory.refresh()
    assert directory.nodes() == []
    keepers.start("decode-0", 3)


@pytest.mark.parametrize("server", ["embedded"], indirect=True)  # long waits, the same for every server
async def test_the_view_outlives_a_restart_of_redis(server: Server, keepers: Keepers) -> None:
    ttl_s = 2.0  # a renewal that is late by a second is in time
    directory = NodeDirectory(server.url, ttl_s)
    await directory.start()
    for node_id in ("decode-0", "prefill-0"):
        keepers.start(node_id, ttl_s=ttl_s)
    leaves = keepers.start("decode-1", ttl_s=ttl_s)
    await until(lambda: len(directory.nodes()) == 3)
    heard: list[list[str]] = []
    directory.on_change(lambda nodes: heard.append([node.id for node in nodes]))
    server.kill()
    leaves.close()  # nobody can be told
    await until(lambda: directory.stale_for_s > 1.25 * ttl_s)
    assert len(directory.nodes()) == 3
    server.start_again()  # empty
    await until(lambda: directory.stale_for_s < ttl_s / 2)
    await until(lambda: len(directory.nodes()) == 2, 2 * ttl_s + SLACK_S)
    assert heard == [["decode-0", "prefill-0"]]  # none of the living was missing for a moment
    with redis.Redis.from_url(server.url) as client:
        assert set(client.hgetall("paceline:default:nodes")) == {b"decode-0", b"prefill-0"}
    await directory.close()


async def test_lost_data_empties_no_view(server: Server, directory: NodeDirectory, keepers: Keepers) -> None:
    keepers.start("decode-0", 2)
    await until(lambda: len(directory.nodes()) == 1)
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        await directory.refresh()
        assert directory.holds("decode-0", 2)
        # The fence was lost too: a zombie that is quicker than its successor does not displace it from the view.
        for _ in range(100):
            client.flushall()
            zombie = keepers.make("decode-0", 1)
            with suppress(Fenced):  # its successor's heartbeat came between
                zombie.write()
            if not zombie.fenced:
                break
        assert not zombie.fenced
        await directory.refresh()
    assert directory.holds("decode-0", 2)
    await asyncio.sleep(TTL_S)
    await until(lambda: directory.holds("decode-0", 2))


@pytest.mark.parametrize("server", ["embedded"], indirect=True)  # long waits, the same for every server
async def test_a_redis_that_hangs_blocks_nothing_for_long(
    server: Server, directory: NodeDirectory, keepers: Keepers
) -> None:
    keeper = keepers.start("decode-0")
    await until(lambda: len(directory.nodes()) == 1)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        await directory.refresh()
        await asyncio.to_thread(keeper.close)
        assert time.monotonic() - began < 9.0
        assert ids(directory) == ["decode-0"]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: directory.nodes() == [], 2 * TTL_S + 2.0 + SLACK_S)


async def test_no_redis_at_all_is_an_error_for_a_node_and_an_empty_view_for_a_router(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'none.sock'}"
    keeper = Keepers(url).make("decode-0")
    began = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        keeper.start()
    keeper.close()
    directory = NodeDirectory(url, TTL_S)
    await directory.start()
    assert directory.nodes() == []
    await directory.close()
    await directory.close()
    assert time.monotonic() - began < JOIN_TIMEOUT_S  # no wait ran into its end


async def test_records_that_cannot_be_read_hide_no_other(
    server: Server, directory: NodeDirectory, keepers: Keepers
) -> None:
    keepers.start("decode-0")
    good = {"id": "decode-1", "role": "decode", "generation": 1, "address": "127.0.0.1:2"}
    bodies: dict[str, str | bytes] = {"decode-1": json.dumps(good | {"colour": "blue"})}  # of a newer version
    bodies |= {"bad-0": "{", "bad-1": "[]", "bad-2": '{"id": "bad-2"}', "bad-3": json.dumps(good), "bad-4": b"\xff"}
    wrong = {"role": "router", "generation": "1", "address": 7, "running": "many", "free_pages": -1, "copies": {"a": 1}}
    for number, (name, value) in enumerate(wrong.items(), 5):
        bodies[f"bad-{number}"] = json.dumps(good | {"id": f"bad-{number}", name: value})
    bodies["bad-large"] = json.dumps(good | {"id": "bad-large", "log": 1_000_000 * "x"})
    with redis.Redis.from_url(server.url) as client:
        client.hset("paceline:default:nodes", mapping=bodies)
        ends = {node_id: int((time.time() + 60) * 1000) for node_id in bodies}
        client.hset("paceline:default:leases", mapping=ends | {"bad-lease": "soon"})
    await until(lambda: len(directory.nodes()) == 2)
    assert ids(directory) == ["decode-0", "decode-1"]
    await asyncio.sleep(TTL_S)
    await until(lambda: directory.stale_for_s < TTL_S)  # it goes on reading


async def test_namespaces_do_not_mix(directory: NodeDirectory, keepers: Keepers) -> None:
    other = keepers.make("decode-0", 9, namespace=namespace_of("other"))
    other.start()
    keepers.start("decode-0", 1)
    await until(lambda: directory.holds("decode-0", 1))
    await asyncio.sleep(TTL_S)  # both have renewed their leases
    await until(lambda: [(node.id, node.generation) for node in directory.nodes()] == [("decode-0", 1)])
    assert not other.fenced


async def test_a_lease_that_nobody_renews_ends_though_the_clock_of_redis_was_set_back(
    keepers: Keepers, directory: NodeDirectory
) -> None:
    """Mutant: the lease is believed until it ends."""
    keepers.start("decode-0")
    keepers.make("decode-1", ttl_s=3600.0).write()
    await until(lambda: [node.id for node in directory.nodes()] == ["decode-0", "decode-1"])
    await until(lambda: [node.id for node in directory.nodes()] == ["decode-0"])
    assert directory.holds("decode-0", 1)
    assert not directory.holds("decode-1", 1)
