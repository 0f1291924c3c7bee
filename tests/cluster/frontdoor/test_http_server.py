"""The HTTP server on a socket: what is answered before any application sees it, and garbage around what it sees."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from cluster.frontdoor import http_server
from cluster.frontdoor.http import create_app
from cluster.frontdoor.http_server import serve_http
from cluster.routing.metrics import Metrics
from paceline.rpc import connections
from tests.support.fake_router import FakeRouter

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def connecting(router: FakeRouter) -> AsyncIterator[Any]:
    """Opens connections to a server."""
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    opened: list[Connection] = []

    async def connect(data: bytes = b"") -> Connection:
        opened.append(await asyncio.open_connection("127.0.0.1", server.port))
        opened[-1][1].write(data)
        return opened[-1]

    try:
        async with asyncio.timeout(60):
            yield connect
    finally:
        for _, writer in opened:
            writer.close()
        await server.stop()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and JSON of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, json.loads(body)


async def test_no_event_waits_for_the_client_to_acknowledge_another(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[asyncio.Transport] = []
    made = http_server._Connection.connection_made

    def connection_made(self: http_server._Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        accepted.append(transport)

    monkeypatch.setattr(http_server._Connection, "connection_made", connection_made)
    async with connecting(router) as connect:
        reader, _ = await connect(HEALTH)
        await answer(reader)
        (transport,) = accepted
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad name: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n"
        + HEALTH,
    ],
)
async def test_bytes_that_are_no_http(router: FakeRouter, data: bytes) -> None:
    """The last is a request in what a gateway takes for the body of another. Mutant: chunks go before the length."""
    async with connecting(router) as connect:
        reader, _ = await connect(data + b"\r\n" * 3)
        status, _, body = await answer(reader)
        assert status == 400
        assert body["error"]["code"] == "invalid_http"
        assert await reader.read() == b""
        assert (await answer((await connect(HEALTH))[0]))[0] == 200


async def test_a_head_that_does_not_arrive(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection that says nothing, and on one that goes on a byte at a time, also after a request."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 1.0)
    async with connecting(router) as connect:
        silent, _ = await connect()
        slow, writer = await connect(HEALTH)
        assert (await answer(slow))[0] == 200
        late = [asyncio.create_task(answer(reader)) for reader in (silent, slow)]
        for byte in HEALTH[:-1]:
            if not late[1].done():
                writer.write(bytes([byte]))
                await asyncio.sleep(0.06)
        for told in await asyncio.gather(*late):
            status, headers, body = told
            assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "timeout")
        assert await silent.read() == b""
        with suppress(ConnectionResetError):  # what it wrote last may have come after the connection was closed
            assert await slow.read() == b""


async def test_the_time_for_a_head_is_not_that_of_the_request(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.7)
    router.stall_after = 1
    async with connecting(router) as connect:
        ask = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n"
        reader, writer = await connect(ask)
        writer.write(b'{"prompt":"hi"}')
        await router.started.wait()
        await asyncio.sleep(1.2)
        router.release.set()
        assert (await answer(reader))[0] == 200


async def test_a_connection_too_many(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    async with connecting(router) as connect:
        first, writer = await connect(HEALTH)
        second, _ = await connect(HEALTH)
        assert [(await answer(reader))[0] for reader in (first, second)] == [200, 200]
        status, headers, body = await answer((await connect(HEALTH))[0])
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
        writer.close()
        await writer.wait_closed()
        while (await answer((await connect(HEALTH))[0]))[0] != 200:  # until the server has noticed
            await asyncio.sleep(0.02)


async def test_garbage_while_a_stream_is_answered(router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    router.stall_after = 1
    async with connecting(router) as connect:
        body = b'{"prompt":"hi","stream":true}'
        ask = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await connect(ask + body)
        await reader.readuntil(b"data: ")
        writer.write(b"\x00\xff" * 500)
        await asyncio.sleep(0.05)
        router.release.set()
        rest = await reader.read()
        assert b"data: [DONE]" in rest
        assert b"400 Bad Request" in rest  # an answer of its own, after the one it came behind
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert (await answer((await connect(HEALTH))[0]))[0] == 200
