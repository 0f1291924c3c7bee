"""Connections that ask nothing are closed, at every gRPC port; who comes back after that sees no error."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.frontdoor.service import serve_grpc
from paceline.client import AsyncClient
from paceline.rpc import calls
from paceline.rpc.identity import Identity
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.fuzz.hostile_frames import begin
from tests.support.all_ports import PORTS, Credential, context_of, deployed
from tests.support.certificates import SECRET, secured
from tests.support.scripted_nodes import fleet

IDLE_S, HANDSHAKE_S = 2.5, 1.0  # in these tests; where all begin at once, a client may look a second late
OFTEN_S = 0.6
CLOSED_S = 10.0
SOCKETS = 10  # of each kind at each port


@dataclass(frozen=True)
class Listening:
    """A port, and how its clients begin TLS; None: in the clear."""

    address: str
    context: ssl.SSLContext | None = None
    name: str = ""  # in its certificate


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDLE_MS", int(IDLE_S * 1000))
    monkeypatch.setattr(calls, "HANDSHAKE_MS", int(HANDSHAKE_S * 1000))


@asynccontextmanager
async def ports(tmp_path: Path, *, encrypted: bool) -> AsyncIterator[dict[str, Listening]]:
    """Those of router, nodes and operators."""
    async with AsyncExitStack() as stack:
        if encrypted:
            deployment = await stack.enter_async_context(deployed(tmp_path))
            found = {}
            for at in ("router gRPC", "admin", "prefill node", "decode node"):
                context = context_of(Credential(deployment.folder, PORTS[at].role, ""))
                context.set_alpn_protocols(["h2"])
                name = "" if PORTS[at].server == "server" else f"{PORTS[at].server}.paceline"
                found[at] = Listening(deployment.addresses[at], context, name)
            yield found
            return
        nodes = await stack.enter_async_context(secured(None))
        server = await serve_grpc((await stack.enter_async_context(fleet())).router, "127.0.0.1:0")
        stack.push_async_callback(server.stop, 0)
        addresses = {"router gRPC": f"127.0.0.1:{server.port}", "decode node": nodes.decode_address}
        addresses["prefill node"] = nodes.prefill.shell.load().address
        yield {at: Listening(address) for at, address in addresses.items()}


async def closed_after_s(at: Listening, data: bytes, *, in_tls: bool) -> float:
    """Write ``data`` and nothing more."""
    host, _, port = at.address.rpartition(":")
    context = at.context if in_tls else None
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=(at.name or None) if context else None
    )
    began = time.monotonic()
    writer.write(data)
    with suppress(ConnectionError):
        async with asyncio.timeout(CLOSED_S):
            while await reader.read(1 << 16):
                pass
    writer.close()
    return time.monotonic() - began


@pytest.mark.parametrize("encrypted", [False, True])
async def test_sockets_that_ask_nothing_are_closed(tmp_path: Path, encrypted: bool) -> None:
    """Those that say nothing at all, nothing within TLS, or the beginning of HTTP/2 and no more. Mutants: a server
    without one of the two bounds."""
    async with ports(tmp_path, encrypted=encrypted) as listening:
        kinds = [(b"".join(begin()), True), (b"", True), (b"", False)]

        async def told(port: Listening) -> list[float]:
            asked = [closed_after_s(port, data, in_tls=in_tls) for data, in_tls in kinds for _ in range(SOCKETS)]
            return await asyncio.gather(*asked)

        for at, seconds in zip(listening, await asyncio.gather(*map(told, listening.values())), strict=True):
            assert max(seconds) < CLOSED_S, at
            assert min(seconds[:SOCKETS]) > HANDSHAKE_S, at  # who has said hello is one that comes back


async def test_clients_that_come_back_see_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of a router, and a router's channel to a node, call again and again, each time about when they are
    closed. A watch and a stream that are silent for longer are not. Mutant: connections are closed for their age."""
    monkeypatch.setattr(calls, "IDLE_MS", int(OFTEN_S * 1000))
    pauses_s = [OFTEN_S * (0.94 + 0.015 * i) for i in range(8)]
    async with fleet() as nodes, secured(None) as real:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        address = f"127.0.0.1:{server.port}"
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(address, retries=0)) for _ in range(4)]
            silent = await stack.enter_async_context(AsyncClient(address, retries=0))
            watching = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            identity = Identity("router", SECRET.call_token)
            node = await stack.enter_async_context(identity.channel(real.decode_address, "decode"))
            watch = health_pb2_grpc.HealthStub(watching).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            gate = nodes.nodes["decode-0"].script.gate = asyncio.Event()
            stream = silent.stream("hello", max_tokens=3, seed=5)
            waits = asyncio.ensure_future(anext(stream))
            for pause_s in pauses_s:
                await asyncio.gather(*(client.model_info() for client in clients))
                await node_pb2_grpc.DecodeNodeStub(node).Status(node_pb2.StatusRequest(), metadata=identity.metadata)
                await asyncio.sleep(pause_s)
            gate.set()
            await waits
            assert [chunk async for chunk in stream][-1].completion is not None
            await server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.stop(0)
