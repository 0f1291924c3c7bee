"""Nodes of a deployment that are killed while it answers, and which streams lost theirs in mid-stream."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psutil

from paceline.client import AsyncClient
from tests.support.server import Server

RETRIED = re.compile(r"(\S+?)(?:#\d+)?: trying again after")  # a line of the router's log; # and a choice's number


@dataclass
class Streams:
    """Who is told what. ``moved`` tells which streams went on at another node, after their client had a token."""

    with_tokens: set[str] = field(default_factory=set)  # request ids of open streams whose client has a token
    struck: set[str] = field(default_factory=set)  # those that were open at a kill
    kills: Counter[str] = field(default_factory=Counter)  # by role
    running_when_killed: int = 0  # sequences on nodes that were killed

    def killed(self, role: str, running: int) -> None:
        """A node was killed."""
        self.kills[role] += 1
        self.running_when_killed += running
        self.struck |= self.with_tokens

    def moved(self, log: str) -> set[str]:
        """Request ids. log: the deployment's, in which the router names each sequence that it tries again."""
        return self.struck & set(RETRIED.findall(log))


@asynccontextmanager
async def nodes_killed(
    server: Server, nodes: int, every_s: float, rng: random.Random, streams: Streams
) -> AsyncIterator[None]:
    """About every ``every_s`` seconds, while all ``nodes`` are there, one that works is killed, by SIGKILL."""
    killing = asyncio.create_task(_kill_nodes(server, nodes, every_s, rng, streams))
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


async def _kill_nodes(server: Server, count: int, every_s: float, rng: random.Random, streams: Streams) -> None:
    killed: set[str] = set()  # addresses, which are listed until their lease has run out
    async with AsyncClient(server.grpc) as client:
        while True:
            await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
            nodes = (await client.model_info()).nodes
            busy = [node for node in nodes if node.running] or list(nodes)
            if len({node.address for node in nodes} - killed) < count:
                continue
            node = rng.choice(busy)
            port = int(node.address.rpartition(":")[2])
            if (process := await asyncio.to_thread(_listens, server, port)) is not None:
                process.kill()
                killed.add(node.address)
                streams.killed(node.role, node.running)


def _listens(server: Server, port: int) -> psutil.Process | None:
    for process in server.processes():
        with suppress(psutil.Error):
            connections = process.net_connections()
            if any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections):
                return process
    return None
