"""``python -m benchmarks.pictures.record_upgrade``: keep what a rolling upgrade does to streams, for its picture.

A deployment serves so many streams at once, one after the other, while ``paceline nodes upgrade`` starts every node
anew. ``--install`` names the shell command that installs another build first, such as a checkout of another commit.
Kept are the generation and state of every node four times a second, and of every stream when it ended, whether it
failed, its tokens and its longest pause between two chunks. Times are seconds since the load began.

Each client asks the same few requests again and again. A stream whose tokens are not those of the first one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.processes import PACELINE
from benchmarks.pictures.data import UPGRADE
from cluster.deployment import Deployment
from paceline.client import AsyncClient, PacelineError
from paceline.config import ServeConfig
from paceline.v1 import admin_pb2, admin_pb2_grpc

COMMAND = "python -m benchmarks.pictures.record_upgrade"
SAMPLE_S = 0.25
CALM_S = 8.0  # of load before the upgrade, and after it
MAX_TOKENS = 96
REQUESTS = 3  # of each client, in turn
GRACE_S = 2.0  # for the streams of a node, before they move
PROMPT = "Tell me about the history of bicycle racing, stage by stage."


@dataclass(frozen=True)
class Ended:
    """One stream."""

    at_s: float
    failed: str  # why; empty for one that was whole
    tokens: int
    longest_pause_s: float


@dataclass(frozen=True)
class Seen:
    """The nodes at one time: generation and state by id."""

    at_s: float
    nodes: dict[str, tuple[int, str]]


@dataclass
class UpgradeRun:
    """What was kept."""

    made_by: str
    model: str
    streams: int
    began_s: float = 0.0  # the upgrade
    ended_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> UpgradeRun:
        """The run of a file."""
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seen = [Seen(one["at_s"], {name: (g, s) for name, (g, s) in one["nodes"].items()}) for one in kept.pop("seen")]
        return cls(**{**kept, "seen": seen, "ended": [Ended(**one) for one in kept.pop("ended")]})

    def write(self, path: Path) -> None:
        """For ``read``."""
        path.write_text(json.dumps(asdict(self), indent=None) + "\n", encoding="utf-8")


class Recording:
    """Load and samples of a deployment that is up."""

    def __init__(self, run: UpgradeRun, client: AsyncClient, admin: str) -> None:
        """admin: "host:port" of the operators' gRPC."""
        self._run, self._client, self._admin = run, client, admin
        self._began, self._over = time.monotonic(), asyncio.Event()
        self._answers: dict[int, list[int]] = {}  # by seed

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return round(time.monotonic() - self._began, 3)

    async def run(self, install: str) -> None:
        """Load, install, upgrade, load. install: a shell command, or empty. Raises RuntimeError when one fails."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._run.streams):
                group.create_task(self._streams(number))
            group.create_task(self._watch())
            await asyncio.sleep(CALM_S)
            self._run.began_s = self.now_s
            try:
                if install:
                    await _succeed(await asyncio.create_subprocess_shell(install, stderr=asyncio.subprocess.PIPE))
                await self._upgrade()
            finally:
                self._run.ended_s = self.now_s
                await asyncio.sleep(CALM_S)
                self._over.set()

    async def _upgrade(self) -> None:
        command = [*PACELINE, "nodes", "upgrade", "--admin", self._admin, "--grace", f"{GRACE_S:g}"]
        await _succeed(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE))

    async def _streams(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            self._run.ended.append(await self._stream(number * REQUESTS + turn % REQUESTS))
            turn += 1

    async def _stream(self, seed: int) -> Ended:
        answer, longest_s, last, failed = list[int](), 0.0, 0.0, ""
        try:
            async for chunk in self._client.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed):
                now = time.monotonic()
                longest_s, last = max(longest_s, now - last if last else 0.0), now
                answer += chunk.token_ids
        except PacelineError as error:
            failed = repr(error)
        failed = failed or ("" if len(answer) == MAX_TOKENS else f"{len(answer)} tokens")
        if not failed and answer != self._answers.setdefault(seed, answer):
            failed = "other tokens than the first time"
        return Ended(self.now_s, failed, len(answer), round(longest_s, 3))

    async def _watch(self) -> None:
        async with grpc.aio.insecure_channel(self._admin) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            while not self._over.is_set():
                found = await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=10.0)
                nodes = {node.node_id: (node.generation, node.state) for node in found.nodes}
                self._run.seen.append(Seen(self.now_s, nodes))
                await asyncio.sleep(SAMPLE_S)


async def _succeed(process: asyncio.subprocess.Process) -> None:
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError((said or b"").decode())


async def record(config: ServeConfig, streams: int, install: str) -> UpgradeRun:
    """One upgrade under ``streams`` streams. install: see ``Recording.run``."""
    run = UpgradeRun(COMMAND, config.model, streams)
    deployment = Deployment(config)
    await deployment.start()
    try:
        async with AsyncClient(deployment.front.grpc_address) as client:
            await Recording(run, client, deployment.admin_address).run(install)
    finally:
        await deployment.stop(grace_s=5.0)
    return run


def main() -> None:
    """Write the run."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prefill-nodes", type=int, default=2)
    parser.add_argument("--decode-nodes", type=int, default=2)
    parser.add_argument("--streams", type=int, default=6, help="at once")
    parser.add_argument("--install", default="", help="shell command that installs another build before the upgrade")
    parser.add_argument("--out", type=Path, default=UPGRADE)
    options = parser.parse_args()
    local = "127.0.0.1:0"
    config = ServeConfig(
        model=options.model,
        prefill_nodes=options.prefill_nodes,
        decode_nodes=options.decode_nodes,
        kv_cache_tokens=16384,
        grpc=local,
        http=local,
        admin=local,
    )
    run = asyncio.run(record(config, options.streams, options.install))
    run.write(options.out)
    failed = sum(bool(one.failed) for one in run.ended)
    print(f"{options.out}: {len(run.ended)} streams, {failed} failed, upgrade of {run.ended_s - run.began_s:.0f} s")


if __name__ == "__main__":
    main()
