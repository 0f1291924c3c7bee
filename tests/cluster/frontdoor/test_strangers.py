"""What somebody with many connections or large bodies takes from the others: on sockets, with small bounds."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.frontdoor import held_bodies, http_exchange, http_server
from cluster.frontdoor.held_bodies import HeldBodies, HeldBody
from cluster.frontdoor.http import create_app, serve_http
from cluster.nodes.listening import check_addresses, is_loopback, raise_open_files
from cluster.routing.metrics import Metrics
from paceline.config import ServeConfig
from paceline.errors import ConfigError, Overloaded
from paceline.rpc import connections
from tests.cluster.frontdoor.test_http_server import HEALTH, answer
from tests.support.fake_router import FakeRouter

LARGE = 8 * 2**20


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeRouter(), Metrics())


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[Any, Any]]:
    server = await serve_http(app, "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect(data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        writer.write(data)
        return reader

    try:
        async with asyncio.timeout(30):
            yield connect, app.state.bodies
    finally:
        for writer in writers:
            writer.close()
        await server.stop()


def ask(length: int, sent: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    return head.encode() + b'{"prompt":"hi"}'.ljust(sent)


async def test_large_bodies_are_bounded_and_small_ones_still_come(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: no budget; one that small bodies wait for; one that is not given back."""
    monkeypatch.setattr(http_exchange, "BODY_START_S", 0.6)
    monkeypatch.setattr(http_exchange, "BODY_TIMEOUT_S", 0.6)
    async with serving(app) as (connect, bodies):
        bodies._most = 2 * 2**20  # of which an address has half
        readers = [await connect(ask(LARGE, 300_000)) for _ in range(8)]
        told = [asyncio.create_task(answer(reader)) for reader in readers]
        while bodies.total < 3 * 300_000:
            await asyncio.sleep(0.01)
        assert bodies.total <= bodies._most * held_bodies.OWNER_SHARE
        assert (await answer(await connect(ask(15, 15))))[0] == 200
        statuses = [(await task)[0] for task in told]
        assert sorted(statuses) == [408] * 3 + [429] * 5
        assert bodies.total == 0
        assert (await answer(await connect(ask(60_000, 60_000))))[0] == 200
        assert bodies.total == 0


def test_one_owner_leaves_half_to_the_others() -> None:
    bodies = HeldBodies(1_000_000)
    first, second = HeldBody(bodies, "a"), HeldBody(bodies, "b")
    first.grow(500_000)
    with pytest.raises(Overloaded):
        first.grow(500_001)
    second.grow(500_000)
    for body in (first, second, first):
        body.release()
    assert bodies.total == 0


async def test_connections_are_counted_by_address_and_by_open_files(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: the cap alone, whatever this process may open; each address of one network counts for itself."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(http_server, "MIN_OF_ADDRESS", 2)
    async with serving(app) as (connect, _):
        kept = [await connect(HEALTH) for _ in range(3)]
        assert [(await answer(reader))[0] for reader in kept] == [200] * 3
        status, _, body = await answer(await connect(HEALTH))
        assert (status, "of your address" in body["error"]["message"]) == (503, True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, hard))
    assert http_server._full(range(40), None) == "6 connections are open"  # type: ignore[arg-type]
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4096)
    assert http_server._full(range(40), None) == "16 connections are open"  # type: ignore[arg-type]
    assert 2 * connections.most_connections(2) + 32 == 64  # gRPC has as many, and files are left for Redis and nodes
    ipv6 = [SimpleNamespace(client=(f"2001:db8::{i:x}", 1)) for i in range(9)]
    for name, value in (("MIN_OF_ADDRESS", 2), ("most_connections", lambda servers: 10)):
        monkeypatch.setattr(http_server, name, value)
    assert "5 connections of your address" in http_server._full(ipv6, ipv6[0].client)  # type: ignore[arg-type]


def test_the_soft_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("key", ["grpc", "http", "admin"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "gpu-1"])
def test_only_this_machine_without_keys(key: str, host: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {key: f"{host}:1234"}
    with pytest.raises(ConfigError, match=f"^{key}: .*insecure"):
        check_addresses(ServeConfig(**options))  # type: ignore[arg-type]
    assert caplog.text == ""
    check_addresses(ServeConfig(**options, api_keys="keys.yaml"))  # type: ignore[arg-type]
    assert caplog.text == ""
    check_addresses(ServeConfig(**options, insecure=True))  # type: ignore[arg-type]
    assert caplog.text.count("INSECURE") == 1
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "[::1]", "localhost")))
