"""Routers as processes: the one of ``paceline serve`` and those that joined, which may be killed and come back."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from signal import SIGKILL

import psutil

from tests.support.server import Server, serve

BACK_TIMEOUT_S = 60.0


@dataclass
class Front:
    """All routers of a deployment, by name. ``main``: that of ``paceline serve``."""

    main: Server
    join: tuple[str, ...]  # options of those that join
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
        """A router that was killed, at the addresses that it had. Returns how long it took, in seconds."""
        before, began = self.routers[name], time.monotonic()
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

    def pids(self) -> list[int]:
        """Process ids of the routers that are there."""
        found = [router.process.pid for router in self.routers.values()]
        return [pid for pid in found if psutil.pid_exists(pid)]
