"""The embedded server: up quickly, private, gone with its parent whatever happens to it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis

from cluster.state import embedded_redis
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.holder import DeploymentLease, Holder
from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry_types import NodeRecord
from tests.fakes.wait import wait_for

PARENT = """
import sys
from cluster.state.embedded_redis import EmbeddedRedis
server = EmbeddedRedis()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


def running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that nobody has collected."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def folder_of(server: EmbeddedRedis) -> Path:
    return Path(server.url.removeprefix("unix://")).parent


def ping(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=2.0) as client:
        return bool(client.ping())


def answers(url: str) -> bool:
    try:
        return ping(url)
    except redis.ConnectionError:
        return False


def test_serves_privately_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        folder = folder_of(server)
        assert folder.stat().st_mode & 0o077 == 0
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            assert client.get("key") == b"value"
            assert client.config_get("port")["port"] == "0"
            client.pexpire("key", 30)
            wait_for(lambda: client.dbsize() == 0)  # expired keys go by themselves
        pid = server.pid
    assert not running(pid)
    assert not folder.exists()
    server.close()


@pytest.mark.parametrize("setpriv", [True, False])
def test_dies_with_a_killed_parent(setpriv: bool, tmp_path: Path) -> None:
    path = os.environ["PATH"] if setpriv else str(tmp_path)
    if setpriv and not any((Path(folder) / "setpriv").exists() for folder in path.split(":")):
        pytest.skip("needs setpriv")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PATH": path}
    )
    with parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().decode().split()
        assert ping(url)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not running(int(pid)), 5.0)
    folder = Path(url.removeprefix("unix://")).parent  # nobody was left to remove it
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_outlives_the_thread_that_made_it() -> None:
    made: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: made.append(EmbeddedRedis()))
    thread.start()
    thread.join()
    with made[0] as server:
        time.sleep(0.1)  # the parent-death signal would come at once
        assert ping(server.url)


def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    with EmbeddedRedis() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_tcp_asks_for_a_password_that_no_process_list_shows() -> None:
    with EmbeddedRedis(tcp=True) as server:
        matched = re.fullmatch(r"redis://:(\S{32})@(127\.0\.0\.1:\d+)/0", server.url)
        assert matched is not None
        password, address = matched.groups()
        assert ping(server.url)
        with pytest.raises(redis.AuthenticationError):
            ping(f"redis://{address}/0")
        assert password not in " ".join(psutil.Process(server.pid).cmdline())


def test_one_that_dies_comes_back_at_its_address_within_a_second() -> None:
    with EmbeddedRedis(tcp=True) as server, redis.Redis.from_url(server.url) as client:
        server.keep_running()
        for _ in range(2):
            client.set("key", "value")
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            wait_for(lambda gone=pid: server.pid != gone)  # type: ignore[misc]  # mypy takes no default of a lambda
            wait_for(lambda: answers(server.url))
            assert time.monotonic() - began < 1.0
            assert client.get("key") is None
        pid = server.pid
    assert not running(pid)


def test_a_full_one_evicts_what_expires_and_never_a_lease() -> None:
    """With a lease of Redis' own in place of ours, ``volatile-ttl`` would evict that first."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        keeper = LeaseKeeper(server.url, NodeRecord("decode-0", "decode", 1, "h:1"), 60.0, lambda: True, dict)
        keeper.write()
        lease = DeploymentLease(server.url, "default", Holder("m"), lambda who: None)
        lease.acquire()
        ours = set(client.keys("*"))
        assert len(ours) == 5
        for number in range(100):
            client.set(f"journal:{number}", 1_000_000 * "x", ex=3600)
        assert client.info("stats")["evicted_keys"] > 30
        assert ours <= set(client.keys("*"))
        keeper.write()
        lease.release()
        keeper.close()


def test_another_port_when_one_was_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    free_port = embedded_redis._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = iter([taken.getsockname()[1]])
        monkeypatch.setattr(embedded_redis, "_free_port", lambda host: next(first, None) or free_port(host))
        with EmbeddedRedis(tcp=True) as server:
            assert f":{taken.getsockname()[1]}/" not in server.url
            assert ping(server.url)


def test_a_server_that_cannot_run_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded_redis, "_binary", lambda: "/bin/false")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / "folder"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(RuntimeError, match="exited with 1; pass --redis URL"):
        EmbeddedRedis()
    assert not (tmp_path / "folder").exists()


def test_a_server_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    spawn = EmbeddedRedis._spawn

    def spawn_patiently(self: EmbeddedRedis) -> subprocess.Popen[bytes]:
        """The deadline is one for starting a process, too."""
        spawned.append(spawn(self))
        monkeypatch.setattr(embedded_redis, "START_DEADLINE_S", 0.3)
        return spawned[0]

    monkeypatch.setattr(EmbeddedRedis, "_spawn", spawn_patiently)
    monkeypatch.setattr(embedded_redis, "_dies_with_parent", lambda: ["sh", "-c", "exec sleep 60"])
    with pytest.raises(RuntimeError, match="did not answer"):
        EmbeddedRedis()
    assert not running(spawned[0].pid)
