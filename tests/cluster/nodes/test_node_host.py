"""A node's process side: it registers what it is, keeps its lease while it lives, drains, and yields to a successor."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cluster.nodes import host
from cluster.nodes.host import NodeHost
from cluster.nodes.node_logs import stderr_file
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import NodeRecord, Registry
from paceline.config import NodeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.v1.inference_pb2 import NodeInfo
from tests.fakes.wait import wait_for

TTL_S = 0.4


class PretendedNode:
    """A node without model or server."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.ticks = True
        self.is_broken = False
        self.stops: list[float] = []
        self.may_stop = threading.Event()
        self.may_stop.set()

    @property
    def shell(self) -> PretendedNode:
        return self

    async def start(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "127.0.0.1:5"

    async def stop(self, grace_s: float) -> None:
        self.stops.append(grace_s)
        await asyncio.to_thread(self.may_stop.wait, 10.0)

    def broken(self) -> bool:
        return self.is_broken

    def alive(self) -> bool:
        return self.ticks

    def load(self) -> NodeInfo:
        return NodeInfo(running=1, waiting=2, free_pages=3, total_pages=4)

    def counts(self) -> dict[str, Any]:
        return {"missing_drafts": 5, "copies": {"ngram": (6, 7)}}

    def prefix_cache(self) -> None:
        return None

    def fingerprint_digest(self) -> str:
        return "digest"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> PretendedNode:
    made = PretendedNode()
    monkeypatch.setattr(host, "make_node", lambda role, node_id, config: made)
    return made


@pytest.fixture
def node_host(server: EmbeddedRedis, node: PretendedNode) -> Iterator[NodeHost]:
    made = NodeHost("decode", "decode-0", 3, NodeConfig(model="m", tp=2), Registry(server.url, TTL_S))
    yield made
    made.stop(0.0)


def seen(server: EmbeddedRedis) -> list[NodeRecord]:
    """What a router that starts now sees."""

    async def read() -> list[NodeRecord]:
        directory = NodeDirectory(server.url, TTL_S)
        await directory.refresh()
        await directory.close()
        return directory.nodes()

    return asyncio.run(read())


def one_seen(server: EmbeddedRedis) -> NodeRecord:
    """The only node that a router sees; a lease may have run out for a moment where threads pause for longer."""
    found: list[NodeRecord] = []

    def there() -> bool:
        found[:] = seen(server)
        return len(found) == 1

    wait_for(there)
    return found[0]


def test_registers_what_it_is(server: EmbeddedRedis, node_host: NodeHost) -> None:
    assert node_host.start() == "127.0.0.1:5"
    record = one_seen(server)
    assert record == NodeRecord(
        id="decode-0",
        role="decode",
        generation=3,
        address="127.0.0.1:5",
        state="ready",
        pid=os.getpid(),
        hostname=socket.gethostname(),
        started_at=pytest.approx(time.time(), abs=30),  # type: ignore[arg-type]  # equals what is near
        model="m",
        fingerprint_digest="digest",
        build=version("paceline"),
        mark=record.mark,
        log=stderr_file(),
        ranks=2,
        running=1,
        waiting=2,
        free_pages=3,
        total_pages=4,
        missing_drafts=5,
        copies={"ngram": [6, 7]},
    )
    status = node_host.status()
    assert (status["alive"], status["fenced"], status["free_pages"]) == (True, False, 3)


def test_a_node_that_lost_a_rank_ends_its_process(
    node: PretendedNode, node_host: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: it waits until its lease is out; an orderly stop, in which ranks end, is a crash."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    node_host.start()
    time.sleep(TTL_S)
    assert ended == []
    node.is_broken = True
    wait_for(lambda: bool(ended))
    assert set(ended) == {1}
    node.is_broken = False
    ended.clear()
    node.may_stop.clear()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(node_host.stop, 0.0)
        wait_for(lambda: bool(node.stops))
        node.is_broken = True
        time.sleep(TTL_S)
        node.may_stop.set()
        stopping.result(10.0)
    assert ended == []


def test_drains_before_it_goes(server: EmbeddedRedis, node: PretendedNode, node_host: NodeHost) -> None:
    node_host.start()
    node.may_stop.clear()
    waiting = threading.Thread(target=node_host.wait_stopped)
    waiting.start()
    stopping = threading.Thread(target=node_host.stop, args=(1.5,))
    stopping.start()
    wait_for(lambda: [record.state for record in seen(server)] == ["draining"])
    assert waiting.is_alive()
    node.may_stop.set()
    stopping.join()
    waiting.join(timeout=5.0)
    assert not waiting.is_alive()
    assert seen(server) == []
    node_host.stop(1.5)
    assert node.stops == [1.5]
    assert node_host.status()["alive"] is False


def test_who_watches_is_told_that_another_watches_now(node_host: NodeHost) -> None:
    """Mutant: the first is told what it is told when the process ends."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(node_host.wait_stopped)
        wait_for(lambda: node_host._watcher == 1)
        second = pool.submit(node_host.wait_stopped)
        assert first.result(5.0) is False
        node_host.stop(0.0)
        assert second.result(5.0) is True


def test_an_engine_that_does_not_tick_loses_the_lease(
    server: EmbeddedRedis, node: PretendedNode, node_host: NodeHost
) -> None:
    node_host.start()
    node.ticks = False
    wait_for(lambda: seen(server) == [])
    assert node_host.status()["alive"] is False
    node.ticks = True
    wait_for(lambda: len(seen(server)) == 1)


def test_an_event_loop_that_is_stuck_loses_the_lease(
    server: EmbeddedRedis, node_host: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LOOP_STALL_S", 0.1)
    node_host.start()
    goes_on = threading.Event()
    node_host._loop.call_soon_threadsafe(goes_on.wait, 10.0)
    wait_for(lambda: seen(server) == [])
    assert seen(server) == []  # nor does it come back while the loop is stuck
    goes_on.set()
    assert one_seen(server).id == "decode-0"


def test_ends_by_itself_when_it_has_a_successor(
    server: EmbeddedRedis, node: PretendedNode, node_host: NodeHost
) -> None:
    node_host.start()
    successor = LeaseKeeper(
        server.url, NodeRecord("decode-0", "decode", 4, "127.0.0.1:6"), TTL_S, lambda: True, node_host._load
    )
    successor.start()
    node_host.wait_stopped()  # the test's own timeout bounds it
    assert node.stops == [0.0]
    assert one_seen(server).generation == 4
    successor.close()


def test_does_not_start_without_a_registry(node: PretendedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "REGISTER_TIMEOUT_S", 0.1)
    node_host = NodeHost("decode", "decode-0", 1, NodeConfig(model="m"), Registry("unix:///nonexistent.sock", TTL_S))
    with pytest.raises(NodeUnavailable, match=r"decode-0 cannot be registered in Redis \(option redis\)"):
        node_host.start()
    node_host.stop(0.0)
    assert node.stops == [0.0]


def test_a_node_that_cannot_start_says_why_and_is_not_registered(
    server: EmbeddedRedis, node: PretendedNode, node_host: NodeHost
) -> None:
    node.failure = ConfigError("drafter_path", "no such folder")
    with pytest.raises(ConfigError, match="drafter_path"):
        node_host.start()
    assert seen(server) == []
    node_host.stop(5.0)
    assert node.stops == []


def test_a_host_that_never_started_can_be_stopped(node: PretendedNode, node_host: NodeHost) -> None:
    node_host.stop(5.0)
    node_host.wait_stopped()
    assert node.stops == []


def test_the_process_side_imports_no_torch_by_itself() -> None:
    code = "import sys, cluster.nodes.host, cluster.nodes.supervise, cluster.state.registry; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_node_is_made_of_is_out_of_the_collectors_sight(node_host: NodeHost) -> None:
    gc.unfreeze()
    node_host.start()
    try:
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("there", "running", "ends"),
    [(b"", 0, True), (b"a router", 0, False), (b"a supervisor", 0, False), (b"", 1, False)],
)
def test_a_node_that_outlived_everybody_ends(
    server: EmbeddedRedis, node: PretendedNode, monkeypatch: pytest.MonkeyPatch, there: bytes, running: int, ends: bool
) -> None:
    """An orphan would hold its device for ever. Mutant: an idle node is taken for an orphan."""
    left = threading.Event()
    monkeypatch.setattr(NodeHost, "_leave", lambda self: left.set())
    monkeypatch.setattr(node, "load", lambda: NodeInfo(running=running))
    with redis.Redis.from_url(server.url) as client:
        if there == b"a supervisor":
            client.hset("paceline:default:holder", "ends", int((time.time() + 60) * 1000))
        elif there:
            client.set("paceline:default:routed", 1)
    made = NodeHost("decode", "decode-0", 3, NodeConfig(model="m", tp=2), Registry(server.url, TTL_S, orphan_s=0.3))
    try:
        made.start()
        assert left.wait(10.0 if ends else 1.0) == ends
    finally:
        made.stop(0.0)


def test_an_orphan_counts_from_when_redis_says_that_it_is_one(
    node: PretendedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of Redis, or a pause of every process, a node may renew its lease before its supervisor does.
    Mutant: the time without an answer counts."""
    left = threading.Event()
    monkeypatch.setattr(NodeHost, "_leave", lambda self: left.set())
    monkeypatch.setattr(node, "load", NodeInfo)
    now = [time.monotonic()]
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    made = NodeHost(
        "decode", "decode-0", 3, NodeConfig(model="m", tp=2), Registry("unix:///none", TTL_S, orphan_s=60.0)
    )

    def told(somebody: bool | None, seconds: float, every: float = 1.0) -> None:
        for _ in range(round(seconds / every)):
            now[0] += every
            made._watched_by(somebody)

    told(True, 1)
    told(None, 300)
    told(False, 1)
    told(True, 1)
    told(False, 1)
    told(False, 100, every=100)  # it was stopped
    told(True, 1)
    assert not left.wait(0.1)
    told(False, 62)
    assert left.wait(5.0)
    made.stop(0.0)


def test_a_node_that_does_not_know_the_secret_is_not_shown_to_a_router(server: EmbeddedRedis) -> None:
    """The router would send the secret's token to its address. Mutant: the mark does not name the address."""
    record = NodeRecord("decode-0", "decode", 3, "127.0.0.1:5").marked("the token")
    forged = replace(record, id="decode-1"), replace(record, id="decode-2", address="10.0.0.9:5", mark="")
    moved = replace(replace(record, id="decode-3").marked("the token"), address="10.0.0.9:5")
    keepers = [LeaseKeeper(server.url, each, 5.0, lambda: True, dict) for each in (record, *forged, moved)]
    for keeper in keepers:
        keeper.write()

    async def read(token: str) -> list[str]:
        directory = NodeDirectory(server.url, TTL_S, token=token)
        await directory.refresh()
        await directory.close()
        return [node.id for node in directory.nodes()]

    assert asyncio.run(read("the token")) == ["decode-0"]
    assert asyncio.run(read("another")) == []
    assert len(asyncio.run(read(""))) == 4
    for keeper in keepers:
        keeper.close()
