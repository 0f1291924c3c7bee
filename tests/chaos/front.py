"""Routers as processes: the one of ``paceline serve`` and those that joined, which may be killed and come back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from tests.support.server import Server, serve

BACK_TIMEOUT_S = 60.0
OUTSIDE_RAY = Path(__file__).parents[1] / "e2e" / "outside_ray.py"


@dataclass
class Front:
    """All routers of a deployment, by name. ``main``: that of ``paceline serve``. ``ray_pid``: the process below which
    its nodes are; that of ``main`` where Ray ends with it."""

    main: Server
    join: tuple[str, ...]  # options of those that join
    ray_pid: int = 0
    routers: dict[str, Server] = field(default_factory=dict)
    _ends: dict[str, ExitStack] = field(default_factory=dict)

    def __enter__(self) -> Front:
        self.routers["serve"] = self.main
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as all_of_them:
            for end in self._ends.values():
                all_of_them.push(end)

    async def add(self, names: list[str]) -> None:
        """Let routers join, all at once."""
        await asyncio.gather(*(asyncio.to_thread(self._start, name) for name in names))

    async def start_again(self, name: str) -> float:
        """A router that was killed, at the addresses that it had; it joins, also where it was the one of ``serve``.
        Returns how long it took, in seconds."""
        before, began = self.routers[name], time.monotonic()
        if name in self._ends:
            self._ends.pop(name).close()
        await asyncio.to_thread(self._start, name, "--grpc", before.grpc, "--http", before.http)
        return time.monotonic() - began

    def _start(self, name: str, *options: str) -> None:
        with ExitStack() as started:
            made = started.enter_context(serve(*self.join, *options, end_with=SIGKILL, verb="router"))
            self.routers[name], self._ends[name] = made, started.pop_all()

    @property
    def grpc(self) -> dict[str, str]:
        """Addresses, by router."""
        return {name: router.grpc for name, router in self.routers.items()}

    @property
    def http(self) -> dict[str, str]:
        """The same of HTTP."""
        return {name: router.http for name, router in self.routers.items()}

    def node_processes(self) -> list[psutil.Process]:
        """Processes among which the nodes are."""
        return psutil.Process(self.ray_pid or self.main.process.pid).children(recursive=True)

    def name_of(self, pid: int) -> str:
        """The router that this process is; empty where none is."""
        return next((name for name, router in self.routers.items() if router.process.pid == pid), "")

    def pids(self) -> list[int]:
        """Process ids of the routers that are there."""
        found = [router.process.pid for router in self.routers.values()]
        return [pid for pid in found if psutil.pid_exists(pid)]


@contextmanager
def outside_ray(cpus: int) -> Iterator[tuple[str, int]]:
    """Address and process of a Ray that outlives every router."""
    command = [sys.executable, str(OUTSIDE_RAY), str(cpus)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
