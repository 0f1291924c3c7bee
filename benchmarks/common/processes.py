"""Servers under measurement, each in processes of its own that end with the measurement whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PACELINE = (sys.executable, "-c", "from cluster.commands.cli import main; main()")
FREE_PORTS = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL = 3000  # characters of a server's log in the message that it failed


class NotReady(RuntimeError):
    """A server ended, or took too long, before it could serve. The message has the end of its log."""


@dataclass(frozen=True)
class Running:
    """A server that is up."""

    pid: int
    line: str  # of its output, that said so; empty where a probe did


@contextmanager
def running(
    command: Sequence[str],
    *,
    ready: str | Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[Running]:
    """Start a server, wait until it is ready, and end it and all processes below it.

    ready: the beginning of a line of its output, or a probe that is asked twice a second. Raises NotReady. The server
    has a session of its own: a Ctrl-C in the terminal reaches this process alone, which then ends the server.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | (environment or {}),
                cwd=folder,
                start_new_session=True,
            )
        try:
            yield Running(process.pid, _wait(process, log, ready, timeout_s))
        finally:
            stop(process)


def _wait(process: subprocess.Popen[bytes], log: Path, ready: str | Callable[[], bool], timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if not isinstance(ready, str):
            if ready():
                return ""
            time.sleep(0.4)
            continue
        for line in log.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(ready) and line.endswith("\n"):
                return line.strip()
        time.sleep(0.1)
    ended = process.poll()
    how = f"was not ready after {timeout_s:g} s" if ended is None else f"ended with exit code {ended}"
    name = " ".join(map(str, process.args if isinstance(process.args, list | tuple) else [process.args]))[-300:]
    raise NotReady(f"{name}: {how}\n{log.read_text(errors='replace')[-LOG_TAIL:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for whatever is left of it after ``STOP_TIMEOUT_S``; safe to call twice.

    No SIGINT: whatever a shell started in the background ignores it, and so does all that it starts.
    """
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=5.0)
    for left in alive:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, timeout=5.0)


@contextmanager
def serving_paceline(options: Sequence[str]) -> Iterator[dict[str, str]]:
    """``paceline serve`` with ``options`` at free ports; its addresses by name: ``grpc``, ``http``. Raises NotReady."""
    with running([*PACELINE, "serve", *FREE_PORTS, *options], ready="ready ") as server:
        yield dict(word.split("=", 1) for word in server.line.split() if "=" in word)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that servers are stopped either way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
