"""An HTTP server inside the running event loop, which keeps the process's signals as they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from paceline.errors import ConfigError, DeadlineExceeded

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_MARGIN_S = 2.0  # on top of the grace, for what was cancelled to end
BACKLOG = 512
MAX_CONNECTIONS = 4096
KEEP_ALIVE_S = 60


class _Embedded(uvicorn.Server):  # type: ignore[misc, unused-ignore]
    """Leaves the signal handlers alone: the process belongs to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A server that listens. ``stop`` ends it."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], port: int) -> None:
        self.port = port
        self._server = server
        self._task = task

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more connections, give requests ``grace_s`` seconds, then cancel them. Idempotent."""
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=grace_s + STOP_MARGIN_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_MARGIN_S)
        for request in list(self._server.server_state.tasks):
            request.cancel()
        if self._server.server_state.tasks:
            await asyncio.wait(set(self._server.server_state.tasks), timeout=STOP_MARGIN_S)


async def serve_http(app: ASGIApp, host: str, port: int) -> HttpServer:
    """Serve ``app``; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=MAX_CONNECTIONS,
    )
    server = _Embedded(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await _started(server, task)
    except BaseException:
        task.cancel()
        listener.close()
        raise
    return HttpServer(server, task, listener.getsockname()[1])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError("http", f"cannot listen on {host}:{port}: {error}") from None


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not server.started:
        if task.done():
            await task
            raise ConfigError("http", "the HTTP server ended while starting")
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(f"the HTTP server did not start within {START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.005)
