"""A real deployment as an operator starts it: ``paceline serve`` in a process of its own."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

READY_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
FOR_TESTS = ("PACELINE_COMMAND", "PACELINE_URL", "PACELINE_FUZZ")  # and what begins so: no options of a deployment
OF_CORES = {"--threads-per-node", "--tp", "--prefill-tp", "--decode-tp"}
SECRET = "the secret of a deployment that tests ask about its nodes"


@dataclass
class Server:
    """A running ``paceline serve``."""

    process: subprocess.Popen[str]
    grpc: str
    http: str
    log: Path
    admin: str = ""

    def processes(self) -> list[psutil.Process]:
        """It and everything below it."""
        here = psutil.Process(self.process.pid)
        return [here, *here.children(recursive=True)]


def paceline() -> str:
    """The installed command; PACELINE_COMMAND names that of another environment."""
    return os.environ.get("PACELINE_COMMAND") or str(Path(sys.executable).with_name("paceline"))


def operator(*words: str) -> subprocess.CompletedProcess[str]:
    """An operator's command, run in this process: one of its own imports for a second before it asks. One at a time."""
    from cluster.commands.cli import main

    said, told, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["paceline", *words]), redirect_stdout(said), redirect_stderr(told):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(words, code, said.getvalue(), told.getvalue())


@contextmanager
def serve(*options: str, end_with: signal.Signals = signal.SIGINT, verb: str = "serve") -> Iterator[Server]:
    """Serve on free ports; at the end Ctrl-C, or the signal given, must drain, exit 0 (unless it kills) and leave no
    process behind. verb: of the command; ``router`` joins."""
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
        log, secret = Path(folder) / "log", Path(folder) / "secret"
        secret.write_text(SECRET)
        command = [paceline(), verb, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--verbose"]
        if verb == "serve" and not OF_CORES & set(options):
            command += ["--threads-per-node", "1"]  # what more threads take of two cores, other tests lack
        command += ["--secret-file", str(secret), *options]
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOR_TESTS)}
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        server = Server(process, "", "", log)
        try:
            server.grpc, server.http, server.admin = _ready(server)
            yield server
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            left, told = _stop(server, end_with)
        wanted = -end_with if end_with is signal.SIGKILL else 0
        assert process.returncode == wanted, f"exit code {process.returncode}; {log.read_text()[-3000:]}"
        assert left == [], left
        assert told == "", f"on stdout after the line that begins with ready: {told[:2000]}"


def _ready(server: Server) -> tuple[str, str, str]:
    assert server.process.stdout is not None
    deadline = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline:
        line = server.process.stdout.readline()
        if not line:
            break
        found = re.match(r"ready grpc=(\S+) http=(\S+)(?:.* admin=(\S+))?", line)
        if found:
            return found[1], found[2], found[3] or ""
    raise AssertionError(f"not ready: {server.log.read_text()[-3000:]}")


def _stop(server: Server, number: signal.Signals) -> tuple[list[str], str]:
    """Processes that are left, and what came on stdout meanwhile."""
    below = server.processes() if server.process.poll() is None else []
    server.process.send_signal(number)
    try:
        server.process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    _, alive = psutil.wait_procs(below, timeout=5.0)
    names = []
    for left in alive:
        names.append(" ".join(left.cmdline())[:120])
        left.kill()
    assert server.process.stdout is not None
    with server.process.stdout as stdout:
        os.set_blocking(stdout.fileno(), False)  # somebody may have it open still
        with suppress(BlockingIOError, TypeError):  # the second: from a text file with nothing to read
            return names, stdout.read()
    return names, ""
