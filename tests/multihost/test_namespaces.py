"""The hosts themselves: what they keep apart, what their links do, and that nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.multihost.hosts import Lan, missing, wait_until

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(60)]

MAKER = """
import os, signal, sys
from pathlib import Path
from tests.multihost.hosts import Lan
lan = Lan(Path(sys.argv[1]))
host = lan.add("one", "10.77.0.1")
print(*lan.pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
# The median of some round trips over one connection, in seconds.
ECHO = "import socket; c, _ = socket.create_server(('', 9)).accept()\nwhile d := c.recv(9): c.send(d)"
PING = """
import socket, statistics, sys, time
connection, trips = socket.create_connection((sys.argv[1], 9), timeout=20), []
for _ in range(20):
    start = time.monotonic()
    connection.send(b"x")
    connection.recv(9)
    trips.append(time.monotonic() - start)
print(statistics.median(trips))
"""


@pytest.fixture
def pair(tmp_path: Path) -> Lan:
    if absent := missing():
        pytest.skip(f"needs {absent}")
    return Lan(tmp_path / "lan")


def round_trip_s(lan: Lan) -> float:
    one, two = lan.hosts["one"], lan.hosts["two"]
    with subprocess.Popen(two.command("python3", "-c", ECHO)) as echo:
        wait_until("the echo", lambda: ":9 " in two.run("ss", "-ltnH"), 10.0)
        median = float(one.run("python3", "-c", PING, two.address))
        echo.wait(10)
    return median


def test_a_slow_link_is_slow_and_a_host_comes_back(pair: Lan) -> None:
    try:
        one, two = pair.add("one", "10.77.0.1"), pair.add("two", "10.77.0.2")
        assert one.run("hostname").strip() == "one"
        assert round_trip_s(pair) < 0.02
        with pair.slow(two, delay_ms=30.0):
            assert 0.06 <= round_trip_s(pair) < 0.2
        assert round_trip_s(pair) < 0.02
        two.unplug()
        with pytest.raises(AssertionError, match=r"timed out|No route"):
            one.run("python3", "-c", "import socket; socket.create_connection(('10.77.0.2', 22), timeout=1)")
        two.plug()
        two.power_off()
        two.power_on()
        assert round_trip_s(pair) < 0.02
        pids = pair.pids()
        assert all(map(psutil.pid_exists, pids))
    finally:
        pair.close()
    wait_until("all are gone", lambda: not any(map(psutil.pid_exists, pids)), 5.0)


def test_a_test_run_that_is_killed_leaves_no_process(tmp_path: Path, pair: Lan) -> None:
    pair.close()
    done = subprocess.run(
        [sys.executable, "-c", MAKER, str(tmp_path / "killed")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 3
    wait_until("all are gone", lambda: not any(map(psutil.pid_exists, pids)), 5.0)
