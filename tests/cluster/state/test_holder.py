"""One process supervises a deployment: who holds the name, who may take it, and who issues generations."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cluster import joined
from cluster.deployment import Deployment
from cluster.nodes import ray_watch
from cluster.nodes.admin import AdminService, serve_admin
from cluster.nodes.supervise import Supervisor
from cluster.parts import Parts
from cluster.state import holder
from cluster.state.holder import DeploymentLease, Holder
from cluster.state.published import Published, Served, read_published
from cluster.state.registry_types import Registry
from cluster.state.wanted import Kept, WantedNode
from cluster.supervision import Supervision
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.rpc.identity import Identity, Secret
from tests.fakes.redis_servers import Embedded
from tests.fakes.wait import wait_for

HOLDER = Path(__file__).with_name("deployment_holder.py")
TAKEN_OVER_S = 3.0  # after a holder's death


@pytest.fixture
def server() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    made.close()


Make = Callable[..., DeploymentLease]


@pytest.fixture
def make(server: Embedded) -> Iterator[Make]:
    with ExitStack() as made:

        def one(
            deployment: str = "default", model: str = "m", lost: Callable[[str], None] = lambda who: None
        ) -> DeploymentLease:
            lease = DeploymentLease(server.url, deployment, Holder(model), lost)
            made.callback(lease.release)
            return lease

        yield one


class Process:
    """Another holder."""

    def __init__(self, url: str, model: str) -> None:
        command = [sys.executable, str(HOLDER), url, "default", model]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() == "held 1"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *raised: object) -> None:
        with self.process:
            self.process.kill()


async def test_a_second_serve_of_the_name_is_refused_and_another_name_is_not(server: Embedded, make: Make) -> None:
    """The second one is a real deployment, whose model is another: it is refused before it starts anything."""
    first = make(model="smollm2")
    first.acquire()
    second = Deployment(ServeConfig(model="other", redis=server.url, grpc="127.0.0.1:0", http="127.0.0.1:0"))
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        await second.start()
    assert time.monotonic() - began < TAKEN_OVER_S
    told = str(refused.value)
    assert f"'default' is held by process {Holder('').pid} on {socket.gethostname()} with model 'smollm2'" in told
    assert "UTC; serve under another name (--deployment NAME), or stop that process" in told
    other = make("other")
    other.acquire()
    assert (first.issue("decode-0", 0), first.issue("decode-0", 0), other.issue("decode-0", 0)) == (1, 2, 1)
    with redis.Redis.from_url(server.url) as client:
        names = {key.decode().split(":")[1] for key in client.keys("*")}
    assert names == {"default", "other"}
    first.release()
    again = make()
    began = time.monotonic()
    again.acquire()  # at once: no lease had to end
    assert time.monotonic() - began < holder.LEASE_S / 2
    assert (again.token, again.issue("decode-0", 0)) == (2, 3)


async def test_a_router_that_joined_ends_when_the_deployment_has_other_options(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes on while nobody holds the deployment, and when it is held again as before."""
    monkeypatch.setattr(joined, "FOLLOW_S", 0.02)
    (tmp_path / "secret").write_text("a secret of this deployment")
    router = joined.JoinedRouter(server.url, ServeConfig(secret_file=str(tmp_path / "secret")))
    told = Published("1", {"acceptance": "sample"}, Served(64, 64, True), [("tiny", "digest")], "text")
    router._told = told
    following = asyncio.create_task(router.follow())
    for options in ({"acceptance": "sample"}, {"acceptance": "typical"}):
        held = make()
        held.acquire()
        assert read_published(server.url, "default") is None  # not yet, or not any more
        held.publish(replace(told, options=options).to_json())
        while read_published(server.url, "default") is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert router.ended.is_set() == (options != told.options)
        held.release()
    await following
    assert "was started anew with other options" in router.problem


async def test_a_router_that_was_succeeded_takes_over_again(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mutant: what the first takeover opened, the operators' address above all, is open for good."""

    class Pretended:
        """Nodes that need nothing, and an address for operators."""

        def __init__(self, front: Any, secret: Any, parts: Parts, lease: Any, config: Any, leaves: bool) -> None:
            self.supervisor, self._parts = Supervisor(lambda *node: None), parts  # type: ignore[arg-type]

        async def start(self) -> None:
            pass

        async def open_admin(self) -> None:
            admin = await serve_admin(AdminService(nobody, nobody, 1.0), f"127.0.0.1:{port}", Identity("router"))
            self._parts.at_end("admin", admin.stop)
            opened.append(admin.port)

    async def answers(_: Any) -> bool:
        return True

    nobody: Any = None
    opened: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    client = redis.Redis.from_url(server.url)
    monkeypatch.setattr(joined, "Supervision", Pretended)
    monkeypatch.setattr(joined, "SUCCEED_S", 0.02)
    monkeypatch.setattr(ray_watch.RayThere, "asked", answers)  # there is no Ray here
    (tmp_path / "secret").write_text("a secret of this deployment")
    router = joined.JoinedRouter(server.url, ServeConfig(secret_file=str(tmp_path / "secret")))
    router.config, router.front = ServeConfig(), None  # type: ignore[assignment]
    router._told = Published("1", {}, Served(64, 64, True), [("tiny", "digest")], "text")
    client.hset("paceline:default:holder", "wanted", "nodes")
    succession = asyncio.create_task(router._succeed())
    for times in (1, 2):
        async with asyncio.timeout(10):
            while len(opened) < times:
                await asyncio.sleep(0.01)
        client.hset("paceline:default:holder", mapping={"mark": "another", "ends": 0})  # while it was stopped
    assert opened == [port, port]
    await joined._cancelled(succession)
    await router.stop(0.0)
    client.close()


async def test_a_serve_that_was_succeeded_is_still_a_router(server: Embedded, make: Make) -> None:
    """Mutant: idle nodes end under it once nobody supervises any more."""
    serve: Any = Deployment(ServeConfig(model="m", drafter="none", redis=server.url))
    serve._successor = asyncio.get_running_loop().create_future()
    serve._successor.set_result("another")
    serve.nodes = SimpleNamespace(supervisor=Supervisor(lambda *node: None))  # type: ignore[arg-type]
    standing_down = asyncio.create_task(serve._stand_down())
    with redis.Redis.from_url(server.url) as client:
        async with asyncio.timeout(5):
            while not client.exists("paceline:default:routed"):
                await asyncio.sleep(0.01)
        assert client.pttl("paceline:default:routed") > 0  # it ends with this process
    await joined._cancelled(standing_down)


async def test_a_start_that_fails_ends_no_node_that_was_there(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of other routers run there. Mutant: whatever a failed start knows of is ended."""
    ended: list[str] = []
    lease, parts = make(), Parts()
    lease.acquire()
    lease.wanted = b"nodes"
    places = SimpleNamespace(close=lambda: ended.append("places"), name="paceline-default-1", bundles=dict)
    monkeypatch.setattr("cluster.nodes.launch.RayNodes", lambda *asked: places)
    front: Any = SimpleNamespace(
        registry=Registry(server.url, 2.0),
        identity=None,
        directory=SimpleNamespace(
            holds=lambda *node: True, heard=lambda *node: None, ended=lambda *node: None, record=lambda *node: None
        ),
    )
    config = ServeConfig(model="m", redis=server.url, ray_address="ray.internal:6379")
    nodes: Any = Supervision(front, Secret("root"), parts, lease, config)
    kept = Kept([WantedNode("decode-0", "decode"), WantedNode("decode-1", "decode")], "paceline-default-1")
    monkeypatch.setattr(nodes, "_left", lambda: kept)
    there = SimpleNamespace(stop=lambda grace_s: ended.append("node"), kill=lambda: ended.append("node"))
    monkeypatch.setattr(nodes, "_adopt", lambda: nodes.supervisor.slots[0].adopt(there, 1, "127.0.0.1:1", 0.0))
    with pytest.raises(AttributeError, match="launch"):  # decode-1 cannot be started
        await parts.bring_up(nodes.start())
    assert ended == []


async def test_nodes_that_an_orderly_end_could_not_end_stay_wanted(server: Embedded, make: Make) -> None:
    """A process that could not renew its lease ends no node. Mutant: they run on, and nobody may supervise them."""
    lease = make()
    lease.token, _, _ = lease._take()  # its thread does not run, as while Redis was away
    lease.keep(b"nodes")
    front: Any = SimpleNamespace(registry=Registry(server.url, 2.0))
    config = ServeConfig(model="m", redis=server.url, ray_address="ray.internal:6379")
    nodes: Any = Supervision(front, Secret("root"), Parts(), lease, config)
    nodes.supervisor = Supervisor(lambda *node: None, may_act=lease.held)  # type: ignore[arg-type]
    await nodes._end()
    lease.release()
    with redis.Redis.from_url(server.url) as client:
        assert client.hget("paceline:default:holder", "wanted") == b"nodes"


def test_a_holder_that_stopped_is_followed_in_time_and_stands_down(server: Embedded, make: Make) -> None:
    with Process(server.url, "old") as old:
        old.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        new = make(model="new")
        new.acquire()
        assert time.monotonic() - began < TAKEN_OVER_S
        assert new.token == 2
        old.process.send_signal(signal.SIGCONT)
        assert "with model 'new'" in old.line()
        assert old.line() == "decode-0 is not started: another process supervises 'default' now"
    time.sleep(2 * holder.RENEW_S)
    assert not new.lost


def test_a_redis_that_lost_its_data_gives_holder_and_generations_back(server: Embedded, make: Make) -> None:
    lease = make()
    lease.acquire()
    assert [lease.issue("decode-0", 0) for _ in range(3)] == [1, 2, 3]
    server.kill()
    server.start_again()
    assert lease.issue("decode-0", 3) == 4  # what the supervisor saw
    rival = make(model="rival")
    with redis.Redis.from_url(server.url) as client:
        wait_for(lambda: client.hget("paceline:default:holder", "mark") is not None)
    with pytest.raises(ConfigError, match="model 'm'"):
        rival.acquire()
    assert not lease.lost


RIVAL = {"mark": "rival", "who": "{}", "ends": "9999999999999"}


@pytest.mark.parametrize("found", [RIVAL | {"token": "1"}, {"token": "2"}], ids=["holds it", "held it and let go"])
def test_a_rival_that_came_meanwhile_is_noticed(server: Embedded, make: Make, found: dict[str, str]) -> None:
    """On an empty Redis both have the token 1: the mark tells them apart."""
    lost: list[str] = []
    old = make(model="old", lost=lost.append)
    old.acquire()
    with redis.Redis.from_url(server.url) as client, client.pipeline(transaction=True) as both:
        both.flushall()
        both.hset("paceline:default:holder", mapping=found)
        both.execute()
    wait_for(lambda: bool(lost))
    assert lost == ["another process"]
    assert old.lost


def test_an_empty_redis_is_given_back_to_the_latest_holder(server: Embedded, make: Make) -> None:
    """The one before it was stopped, and writes itself down first. Mutant: whoever comes first holds the deployment,
    and replaces nodes of which it knows no more."""
    old, new = make(model="old"), make(model="new")
    old.token, _, _ = old._take()
    with redis.Redis.from_url(server.url) as client:
        client.hset("paceline:default:holder", "ends", 1)
        new.acquire()
        earlier = {"mark": old._mark, "who": "{}", "ends": "9999999999999", "token": old.token}
        with client.pipeline(transaction=True) as both:
            both.flushall()
            both.hset("paceline:default:holder", mapping=earlier)
            both.execute()
        assert new.issue("decode-0", 0) == 1
        wait_for(lambda: client.hget("paceline:default:holder", "mark") == new._mark.encode())
    assert (old._renew() is None, new.lost) == (False, False)


def test_a_redis_that_is_away_for_a_moment_is_waited_for(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.kill()
    late = threading.Timer(0.3, server.start_again)
    late.start()
    lease = make()
    lease.acquire()
    late.join()
    monkeypatch.setattr(holder, "REDIS_WAIT_S", 0.2)
    server.kill()
    with pytest.raises(NodeUnavailable, match=r"\(option redis\) did not give a generation for decode-0 in 0.2 s"):
        lease.issue("decode-0", 1)


def test_records_of_nodes_that_went_without_a_word_are_removed(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = int(time.time() * 1000)
    with redis.Redis.from_url(server.url) as client:
        client.hset("paceline:default:nodes", mapping={"decode-0": "{}", "decode-1": "{}"})
        client.hset(
            "paceline:default:leases", mapping={"decode-0": now_ms - 2 * holder.FORGET_MS, "decode-1": now_ms - 1000}
        )
        make().acquire()
        wait_for(lambda: client.hkeys("paceline:default:leases") == [b"decode-1"])
        assert client.hkeys("paceline:default:nodes") == [b"decode-1"]


def test_who_lost_the_deployment_issues_nothing_although_nobody_holds_it(server: Embedded, make: Make) -> None:
    """The successor came and went before the old holder's next renewal. Mutant: only the mark is compared."""
    old, new = make(model="old"), make(model="new")
    old.token, _, _ = old._take()  # its thread does not run, as in a process that was stopped
    with redis.Redis.from_url(server.url) as client:
        client.hset("paceline:default:holder", "ends", 1)
    new.acquire()
    new.release()
    with pytest.raises(NodeUnavailable, match="another process supervises"):
        old.issue("decode-0", 0)


def test_a_dead_holders_lease_from_before_a_step_of_the_clock_is_taken(
    server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis's clock was set back by a day after the last renewal. Mutant: the lease is believed until it ends."""
    monkeypatch.setattr(holder, "LEASE_S", 0.3)
    with redis.Redis.from_url(server.url) as client:
        ends = int((time.time() + 86_400) * 1000)
        client.hset("paceline:default:holder", mapping={"mark": "dead", "who": "{}", "ends": ends, "token": 1})
    lease = make()
    taking = threading.Thread(target=lease.acquire, daemon=True)
    taking.start()
    taking.join(TAKEN_OVER_S)
    assert lease.token == 2


def test_only_what_a_lost_holder_left_is_taken_over(server: Embedded, make: Make) -> None:
    """Mutants: a deployment that nobody serves is taken; an orderly end leaves nodes; one that is to leave them not."""
    old, router = make(model="old"), make(model="router")
    assert not router.succeed()
    old.token, _, _ = old._take()  # its thread does not run, as in a process that was killed
    old.keep(b"nodes")
    began = time.monotonic()
    while not router.succeed():
        time.sleep(0.05)
    assert holder.LEASE_S / 2 < time.monotonic() - began < TAKEN_OVER_S
    assert (router.token, router.wanted, router.held()) == (2, b"nodes", True)
    with pytest.raises(NodeUnavailable, match="another process supervises"):
        old.keep(b"other nodes")
    router.leaves = True
    router.release()
    third, fourth = make(), make()
    assert third.succeed()
    assert third.wanted == b"nodes"
    third.release()
    assert not fourth.succeed()


def test_a_holder_that_cannot_renew_does_not_act(server: Embedded, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been succeeded behind a partition."""
    monkeypatch.setattr(holder, "LEASE_S", 0.8)
    lease = make()
    lease.acquire()
    time.sleep(1.0)
    assert lease.held()
    server.kill()
    wait_for(lambda: not lease.held())
    server.start_again()
    wait_for(lease.held)
