"""``python -m benchmarks.pictures.record_upgrade``: keep what a rolling upgrade does to streams, for its picture.

A deployment with three routers serves streams over gRPC and HTTP, one after the other for each client. ``paceline
nodes upgrade`` starts every node anew. Then every router is ended and started anew, one by one. The last of them is
the process of ``paceline serve``: a router that joined takes over from it. ``--install`` names the shell command that
installs another build first, such as a checkout of another commit.

Kept are, four times a second, the generation and state of every node and router, and of every stream when it ended,
whether it failed, its tokens and its longest pause between two chunks. Times are seconds since the load began.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.processes import PACELINE, running
from benchmarks.pictures.data import UPGRADE
from benchmarks.pictures.upgrade_load import Clients, Ended
from cluster.state.embedded_redis import EmbeddedRedis
from paceline.v1 import admin_pb2, admin_pb2_grpc

COMMAND = "python -m benchmarks.pictures.record_upgrade"
SAMPLE_S = 0.25
CALM_S = 8.0  # of load before the upgrade, between its parts and after it
GRACE_S = 2.0  # for the streams of a node, before they move
SERVE, JOINED = "serve", ("joined-1", "joined-2")
SERVES, ENDED = "ready", "ended"  # states of a router


@dataclass(frozen=True)
class Seen:
    """The nodes and routers at one time: generation and state by id."""

    at_s: float
    nodes: dict[str, tuple[int, str]]
    routers: dict[str, tuple[int, str]]


@dataclass
class UpgradeRun:
    """What was kept."""

    made_by: str
    model: str
    streams: int
    installed: str = ""  # what ``--install`` did
    began_s: float = 0.0  # the upgrade
    routers_s: float = 0.0  # that of the routers
    ended_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> UpgradeRun:
        """The run of a file."""

        def states(kept: dict[str, Any]) -> dict[str, tuple[int, str]]:
            return {name: (generation, state) for name, (generation, state) in kept.items()}

        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seen = [Seen(one["at_s"], states(one["nodes"]), states(one["routers"])) for one in kept.pop("seen")]
        return cls(**{**kept, "seen": seen, "ended": [Ended(**one) for one in kept.pop("ended")]})

    def write(self, path: Path) -> None:
        """For ``read``."""
        path.write_text(json.dumps(asdict(self), indent=None) + "\n", encoding="utf-8")


class Routers:
    """Processes of routers, by name, each at addresses that it keeps."""

    def __init__(self, options: Sequence[str], join: Sequence[str]) -> None:
        """options: of ``paceline serve``. join: of ``paceline router``."""
        self._options, self._join = options, join
        self._ends: dict[str, ExitStack] = {}
        self.states: dict[str, tuple[int, str]] = {}
        self.addresses: dict[str, dict[str, str]] = {}  # grpc, http and admin of each

    def __enter__(self) -> Routers:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in reversed(self._ends):
            self._ends[name].close()

    async def start(self, name: str) -> None:
        """Until it serves. Raises NotReady."""
        at = self.addresses.get(name) or dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")
        generation = self.states.get(name, (0, ""))[0] + 1
        verb = ["serve", *self._options] if name == SERVE and generation == 1 else ["router", *self._join]
        command = [*PACELINE, *verb, *(word for key, value in at.items() for word in (f"--{key}", value))]
        end = ExitStack()
        server = await asyncio.to_thread(lambda: end.enter_context(running(command, ready="ready ")))
        self._ends[name] = end
        self.addresses[name] = dict(word.split("=", 1) for word in server.line.split() if word.partition("=")[0] in at)
        self.states[name] = generation, SERVES

    async def renew(self, name: str) -> None:
        """End it by SIGTERM, which drains it, and start it at the same addresses: as one that joins."""
        self.states[name] = self.states[name][0], ENDED
        await asyncio.to_thread(self._ends.pop(name).close)
        await self.start(name)

    def all_at(self, kind: str) -> dict[str, str]:
        """Addresses of a kind, by router."""
        return {name: at[kind] for name, at in self.addresses.items()}


class Recording:
    """Load and samples of a deployment that is up."""

    def __init__(self, run: UpgradeRun, routers: Routers) -> None:
        self._run, self._routers = run, routers
        self._clients = Clients(routers.all_at("grpc"), routers.all_at("http"))
        self._began, self._over = time.monotonic(), asyncio.Event()

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return round(time.monotonic() - self._began, 3)

    async def run(self) -> None:
        """Load, install, upgrade, load. Raises RuntimeError when a command fails, NotReady when a router does."""
        async with asyncio.TaskGroup() as group:
            for client in range(self._run.streams):
                group.create_task(self._streams(client))
            group.create_task(self._watch())
            await asyncio.sleep(CALM_S)
            self._run.began_s = self.now_s
            try:
                if self._run.installed:
                    await _succeed(
                        await asyncio.create_subprocess_shell(self._run.installed, stderr=asyncio.subprocess.PIPE)
                    )
                await self._upgrade_nodes()
                await asyncio.sleep(CALM_S)
                self._run.routers_s = self.now_s
                for name in (*JOINED, SERVE):
                    await self._routers.renew(name)
            finally:
                self._run.ended_s = self.now_s
                await asyncio.sleep(CALM_S)
                self._over.set()

    async def _upgrade_nodes(self) -> None:
        admin = self._routers.addresses[SERVE]["admin"]
        command = [*PACELINE, "nodes", "upgrade", "--admin", admin, "--grace", f"{GRACE_S:g}"]
        await _succeed(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE))

    async def _streams(self, client: int) -> None:
        turn = 0
        while not self._over.is_set():
            ended = await self._clients.stream(client, turn)
            self._run.ended.append(replace(ended, at_s=self.now_s))
            turn += 1

    async def _watch(self) -> None:
        while not self._over.is_set():
            for admin in self._routers.all_at("admin").values():  # one of them supervises
                try:
                    async with grpc.aio.insecure_channel(admin) as channel:
                        stub: Any = admin_pb2_grpc.AdminStub(channel)
                        found = await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=2.0)
                except grpc.aio.AioRpcError:
                    continue
                nodes = {node.node_id: (node.generation, node.state) for node in found.nodes}
                self._run.seen.append(Seen(self.now_s, nodes, dict(self._routers.states)))
                break
            await asyncio.sleep(SAMPLE_S)


async def _succeed(process: asyncio.subprocess.Process) -> None:
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError((said or b"").decode())


async def record(options: Sequence[str], run: UpgradeRun) -> None:
    """One upgrade. options: of ``paceline serve``, beside those that make nodes outlive its process."""
    import ray

    from cluster.nodes.ray_session import start_ray, stop_ray

    with tempfile.TemporaryDirectory(prefix="paceline-upgrade-") as folder, EmbeddedRedis(tcp=True) as redis:
        secret = Path(folder, "secret")
        secret.write_text(secrets.token_hex(32))
        start_ray("local", 8)
        try:
            shared = ["--secret-file", str(secret), "--ray-address", ray.get_runtime_context().gcs_address]
            serve = [*options, *shared, "--redis", redis.url, "--node-host", "127.0.0.1", "--leave-nodes"]
            with Routers(serve, [*shared, "--join", redis.url]) as routers:
                for name in (SERVE, *JOINED):
                    await routers.start(name)
                await Recording(run, routers).run()
        finally:
            stop_ray()


def main() -> None:
    """Write the run."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prefill-nodes", type=int, default=2)
    parser.add_argument("--decode-nodes", type=int, default=2)
    parser.add_argument("--streams", type=int, default=6, help="at once; half of them over HTTP")
    parser.add_argument("--install", default="", help="shell command that installs another build before the upgrade")
    parser.add_argument("--out", type=Path, default=UPGRADE)
    given = parser.parse_args()
    run = UpgradeRun(COMMAND, given.model, given.streams, given.install)
    options = ["--model", given.model, "--kv-cache-tokens", "16384"]
    options += ["--prefill-nodes", str(given.prefill_nodes), "--decode-nodes", str(given.decode_nodes)]
    asyncio.run(record(options, run))
    run.write(given.out)
    failed = sum(bool(one.failed) for one in run.ended)
    print(f"{given.out}: {len(run.ended)} streams, {failed} failed, upgrade of {run.ended_s - run.began_s:.0f} s")


if __name__ == "__main__":
    main()
