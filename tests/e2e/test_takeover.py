"""The process of ``serve`` is killed: its nodes and streams go on, and a router that joined supervises them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from paceline.client import Client
from tests.fakes.redis_servers import Embedded
from tests.fakes.wait import wait_for
from tests.multihost.small_model import write_model
from tests.support.server import Server, operator, serve
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OUTSIDE_RAY = Path(__file__).with_name("outside_ray.py")
LONG, SHORT = 450, 24  # tokens of a stream that outlives a router, and of an answer that tells one model from another
BODY: dict[str, Any] = {"prompt": "In a paceline the front rider", "seed": 20, "max_tokens": LONG, "ignore_eos": True}
BACK_S = 60.0
# For a deployment to answer once another one of its Redis and Ray has ended. Three times what is asked for: other tests
# run beside.
STILL_S = 30.0


@pytest.fixture
def outside_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[OutsideRay]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with OutsideRay() as ray:
        yield ray


class OutsideRay:
    """One that outlives every router, and may be lost itself."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._start()

    def _start(self, *port: str) -> None:
        command = [sys.executable, str(OUTSIDE_RAY), "2", *port]
        self.process = self._ends.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        """All that it has started ends with it."""
        self.process.kill()
        self._ends.close()

    def start_again(self) -> None:
        """Another one at the same address."""
        self._start(self.address.rpartition(":")[2])

    def __enter__(self) -> OutsideRay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()


def test_nodes_and_streams_outlive_serve(outside_ray: OutsideRay, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=512))
    with Embedded() as registry:
        options = (
            "--admin",
            "127.0.0.1:0",
            "--model",
            str(folder),
            "--redis",
            registry.url,
            "--drafter",
            "ngram",
            "--kv-cache-tokens",
            "1024",
        )
        at_ray = ("--ray-address", outside_ray.address)
        nodes = ("--prefill-nodes", "0", "--no-standby", *at_ray, "--node-host", "127.0.0.1")
        joining = ("--join", registry.url, *at_ray, "--admin", "127.0.0.1:0")
        with (
            serve(*options, *nodes, end_with=signal.SIGKILL) as server,
            serve(*joining, end_with=signal.SIGTERM, verb="router") as router,
        ):
            whole = tokens(server.http, LONG)
            assert [node["node_id"] for node in listed(server.admin)] == ["decode-0"]
            done = ask_nodes(router.admin)
            assert (done.returncode, server.admin in done.stderr) == (1, True), done.stderr  # it supervises none yet
            found: list[int] = []
            asked = {name: BODY[name] for name in ("seed", "max_tokens", "ignore_eos")}
            with Client([server.grpc, router.grpc]) as client:
                for number, chunk in enumerate(client.stream(str(BODY["prompt"]), **asked)):
                    found += chunk.token_ids
                    if number == 3:
                        server.process.kill()
            assert found == whole
            admin = router.admin
            wait_for(lambda: f"operators are served at {admin}" in router.log.read_text())
            (node,) = listed(admin)
            assert (node["node_id"], node["generation"], node["state"]) == ("decode-0", 1, "ready")  # as it was
            os.kill(node["pid"], signal.SIGKILL)
            assert tokens(router.http) == whole[:SHORT]  # by the next generation, which the router starts
            (node,) = listed(admin)
            assert node["generation"] == 2
            outside_ray.kill()
            wait_for(lambda: "does not answer" in listed(admin)[0]["detail"])
            health = httpx.get(f"http://{router.http}/health").json()
            assert "does not answer" in health["trouble"]
            outside_ray.start_again()
            wait_for(lambda: httpx.get(f"http://{router.http}/ping").status_code == 200, BACK_S)
            assert tokens(router.http) == whole[:SHORT]  # the router has joined the other Ray


def test_two_deployments_on_one_redis_and_one_ray(outside_ray: OutsideRay, tmp_path: Path) -> None:
    """Each has a model of its own, and neither notices the other. Mutants: keys, or names in Ray, without the
    deployment's name; an end that ends every node of the cluster."""
    sizes = {"green": tiny_spec(CHAT_VOCAB), "blue": tiny_spec(CHAT_VOCAB, num_layers=1)}
    models = {
        name: write_model(tmp_path / name, replace(spec, max_position_embeddings=512), seed=seed)
        for seed, (name, spec) in enumerate(sizes.items())
    }
    with Embedded() as registry, ExitStack() as ends:

        def deployed(name: str) -> AbstractContextManager[Server]:
            nodes = ("--prefill-nodes", "0", "--no-standby", "--node-host", "127.0.0.1", "--kv-cache-tokens", "1024")
            where = ("--redis", registry.url, "--ray-address", outside_ray.address, "--admin", "127.0.0.1:0")
            return serve(*nodes, *where, "--deployment", name, "--model", str(models[name]), "--drafter", "ngram")

        green = ends.enter_context(deployed("green"))
        before, ours = listed(green.admin), tokens(green.http)
        with deployed("blue") as blue:
            theirs = tokens(blue.http)
            assert theirs != ours
            assert tokens(green.http) == ours
            (node,) = listed(blue.admin)
            assert (node["node_id"], node["pid"] != before[0]["pid"]) == ("decode-0", True)
            os.kill(node["pid"], signal.SIGKILL)
            assert tokens(blue.http) == theirs
            assert listed(blue.admin)[0]["generation"] == 2
            assert identity(green.admin) == [(1, before[0]["pid"])]
        began = time.monotonic()
        assert tokens(green.http) == ours
        assert time.monotonic() - began < STILL_S
        assert identity(green.admin) == [(1, before[0]["pid"])]
        os.kill(before[0]["pid"], signal.SIGKILL)
        assert tokens(green.http) == ours  # its place in Ray is still its own
        assert listed(green.admin)[0]["generation"] == 2
        with redis.Redis.from_url(registry.url) as client:
            assert {key.split(b":")[1] for key in client.scan_iter("paceline:*")} <= {b"green", b"blue"}
            assert not client.hkeys("paceline:blue:leases")


def identity(admin: str) -> list[tuple[int, int]]:
    return [(node["generation"], node["pid"]) for node in listed(admin)]


def tokens(address: str, count: int = SHORT) -> list[int]:
    reply = httpx.post(f"http://{address}/v1/completions", json=BODY | {"max_tokens": count}, timeout=BACK_S)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["paceline"]["token_ids"][0]
    return found


def listed(admin: str) -> list[dict[str, Any]]:
    done = ask_nodes(admin)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def ask_nodes(admin: str) -> subprocess.CompletedProcess[str]:
    """Mutant for a router that joined: nobody listens at its address before a takeover."""
    return operator("nodes", "list", "--json", "--admin", admin)
