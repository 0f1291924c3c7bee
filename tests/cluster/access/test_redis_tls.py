"""Redis with TLS, certificates of clients and a password, as `--redis` names it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cluster.state.embedded_redis import _dies_with_parent, _free_port
from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import NodeRecord
from paceline.rpc.tls import TlsFolder
from tests.support.certificates import expired, make_folder

CALL_TIMEOUT_S = 5.0


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[tuple[int, TlsFolder]]:
    """A Redis that takes TLS, certificates of this deployment and a password alone; its port and the folder."""
    binary = shutil.which("redis-server")
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout if binary else ""
    if binary is None or "libssl" not in linked:
        pytest.skip("needs a redis-server with TLS")
    folder, port = make_folder(tmp_path / "a"), _free_port("127.0.0.1")
    files = {"cert-file": "server.pem", "key-file": "server.key", "ca-cert-file": "ca.pem"}
    options = ["--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", "secret"]
    options += [text for name, file in files.items() for text in (f"--tls-{name}", str(folder.path / file))]
    command = [*_dies_with_parent(), binary, *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd="/") as process:
        end = time.monotonic() + CALL_TIMEOUT_S
        while not _answers(rediss(port, folder, "router")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield port, folder
        process.kill()


def rediss(port: int, folder: TlsFolder | None, role: str, password: str = "secret") -> str:
    """As an operator writes it for --redis."""
    if folder is None:
        return f"redis://:{password}@127.0.0.1:{port}/0"
    names = {"ssl_ca_certs": folder.path / "ca.pem"}
    if role:
        names |= {"ssl_certfile": folder.path / f"{role}.pem", "ssl_keyfile": folder.path / f"{role}.key"}
    query = "&".join(f"{name}={path}" for name, path in names.items())
    return f"rediss://:{password}@127.0.0.1:{port}/0?{query}"


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=2.0) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False


async def test_redis_with_certificates_and_a_password(tls_redis: tuple[int, TlsFolder], tmp_path: Path) -> None:
    """A node's lease and the router's view of it go over it, in the URL that security.md shows."""
    port, folder = tls_redis
    stranger, old = make_folder(tmp_path / "b"), expired(folder, tmp_path / "c")
    shown = [(None, ""), (folder, ""), (stranger, "router"), (old, "router")]
    assert [_answers(rediss(port, *one)) for one in shown] == [False] * len(shown)
    assert not _answers(rediss(port, folder, "router", "guess"))
    url = rediss(port, folder, "router")
    lease = LeaseKeeper(url, NodeRecord("decode-0", "decode", 1, "127.0.0.1:1"), 2.0, lambda: True, dict)
    directory = NodeDirectory(url, 2.0)
    lease.start()
    await directory.start()
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while [node.id for node in directory.nodes()] != ["decode-0"]:
                await asyncio.sleep(0.02)
    finally:
        lease.close()
        await directory.close()
