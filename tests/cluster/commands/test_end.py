"""How the process of ``serve`` ends, in processes of their own with a deployment that is only pretended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(120)

# argv: whether it "serves", still "starts", or ends while something never does: a thread ("stuck"), one of the event
# loop ("waits"), a task ("stays"). "fails": it has ended by itself.
PROCESS = """
import asyncio, sys, threading
from cluster.commands import cli
from cluster.nodes.ray_session import SESSION
from paceline.config import ServeConfig

class Pretended:
    problem = ""
    def __init__(self):
        self.ended = asyncio.Event()
    async def start(self):
        if sys.argv[1] == "fails":
            self.problem = "no node is left"
            self.ended.set()
        if sys.argv[1] == "starts":
            print("starts", flush=True)
            await asyncio.Event().wait()
    async def stop(self, grace_s):
        assert SESSION.quits
        await asyncio.sleep(0.3)
        if sys.argv[1] == "stuck":
            threading.Thread(target=threading.Event().wait).start()
        if sys.argv[1] in ("waits", "fails"):
            asyncio.create_task(asyncio.to_thread(threading.Event().wait))
            await asyncio.sleep(0.1)
        if sys.argv[1] == "stays":
            asyncio.create_task(stays(), name="stays")
            await asyncio.sleep(0)

async def stays():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

cli._to_its_end(cli._run(lambda tell: Pretended(), lambda made: "ready", ServeConfig(model="m")))
"""


@pytest.mark.parametrize("how", ["serves", "starts", "stuck", "waits", "stays"])
def test_signals_while_it_ends_change_nothing(how: str) -> None:
    """Mutants: signals are heeded while it ends, or while a start is ended; the interpreter waits for a thread that
    does not end, the event loop for one of its own, or for a task; Ray is to be shut down."""
    with subprocess.Popen([sys.executable, "-c", PROCESS, how], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() in ("ready", "starts")
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.1)
            end = time.monotonic() + 30.0
            while process.poll() is None and time.monotonic() < end:
                for number in (signal.SIGTERM, signal.SIGINT):
                    process.send_signal(number)
                time.sleep(0.01)
        finally:
            process.kill()
    assert process.returncode == 0


def test_what_has_ended_it_is_told() -> None:
    """A thread that never ends changes neither that nor the exit code."""
    done = subprocess.run([sys.executable, "-c", PROCESS, "fails"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("error no node is left")) == (1, 1), done.stderr
