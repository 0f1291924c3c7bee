"""Where a host is reached, and whether another one answers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from cluster.nodes import addresses
from cluster.nodes.addresses import host_answers, own_address
from paceline.config import AUTO_HOST, ServeConfig
from paceline.errors import ConfigError

LISTEN = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


def test_an_address_is_taken_as_it_is() -> None:
    assert own_address("10.1.2.3") == "10.1.2.3"


def test_an_interface_goes_before_the_address() -> None:
    assert own_address("10.1.2.3", "lo") == "127.0.0.1"
    assert own_address(AUTO_HOST, "lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no 'eth99', only .*lo") as caught:
        own_address(AUTO_HOST, "eth99")
    assert caught.value.key == "node_interface"


def test_an_interface_without_a_usable_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        family, address = socket.AF_INET6, "fe80::1%ib0"

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [Link()]})
    with pytest.raises(ConfigError, match="no address"):
        own_address(AUTO_HOST, "ib0")


def test_auto_is_loopback_on_a_private_ray_only() -> None:
    assert ServeConfig().node(threads=1).host == "127.0.0.1"
    assert ServeConfig(ray_address="auto").node(threads=1).host == AUTO_HOST
    assert ServeConfig(ray_address="auto", node_host="10.0.0.1").node(threads=1).host == "10.0.0.1"
    assert ServeConfig(node_host="::1").node(threads=1).host == "::1"


async def test_a_stopped_process_is_on_a_host_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "ANSWER_TIMEOUT_S", 30.0)  # a busy machine may pause for a second
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        assert await host_answers(address)
        os.kill(process.pid, signal.SIGSTOP)
        assert await host_answers(address)
        process.kill()
        process.wait()
    assert await host_answers(address)  # refused by the host


async def test_silence_and_no_route_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.sleep(60)

    async def unroutable(*_: object) -> None:
        raise OSError("No route to host")

    for connect in (silent, unroutable):
        monkeypatch.setattr(asyncio, "open_connection", connect)
        start = time.monotonic()
        assert await host_answers("10.0.0.1:1") is False
        assert time.monotonic() - start < addresses.ANSWER_TIMEOUT_S + 2.0


async def test_no_open_file_left_says_nothing_of_the_peer() -> None:
    """It listens all the while. Mutants: what this process has no more of is a host that is cut off; or one that
    answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert await host_answers(address) is True
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.dup(0)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
            with suppress(OSError):  # there are too many
                while True:
                    taken.append(os.dup(0))
            assert await host_answers(address) is None
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await host_answers(address) is True
