"""Servers for the registry's tests, which can be killed, stopped and started again at the same address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from cluster.state.embedded_redis import EmbeddedRedis, _dies_with_parent, _free_port

START_TIMEOUT_S = 10.0


class Embedded(EmbeddedRedis):
    """What Paceline starts by itself."""

    def kill(self) -> None:
        """As by the kernel; all data is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        """Empty, at the same address."""
        self._process = self._spawn()
        assert self._ready(last=True)


class DebianRedis:
    """The distribution's redis-server on a TCP port of the loopback."""

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("needs redis-server")
        self._port = _free_port("127.0.0.1")
        self.url = f"redis://127.0.0.1:{self._port}/0"
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--hz", "50"]
        self._command = [*_dies_with_parent(), binary, *options]
        self.start_again()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_again(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except (OSError, redis.RedisError):
                assert self._process.poll() is None, "redis-server ended"
                assert time.monotonic() < end, "redis-server did not answer"
                time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            self.kill()


Server = Embedded | DebianRedis


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """It takes connections and answers nothing in here."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextmanager
def unreachable(server: Embedded) -> Iterator[None]:
    """It takes no connections in here, and those that it had are broken. It keeps its data."""
    socket_file = Path(server.url.removeprefix("unix://"))
    aside = socket_file.rename(socket_file.with_suffix(".aside"))
    try:
        with redis.Redis.from_url(f"unix://{aside}") as client:
            client.client_kill_filter(_type="normal", skipme=True)
        yield
    finally:
        aside.rename(socket_file)


SERVERS: dict[str, type[Embedded] | type[DebianRedis]] = {"embedded": Embedded, "debian": DebianRedis}
