"""Connections are bounded at every gRPC port, and places come back."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from cluster.frontdoor.service import serve_grpc
from cluster.nodes import admin
from paceline.client import AsyncClient
from paceline.errors import NodeUnavailable
from tests.fuzz.hostile_frames import begin
from tests.rpc.test_idle_connections import Listening, ports
from tests.support.scripted_nodes import fleet

FILES = 24  # that this process may open, it is told; half of them are for connections
MOST = {"router gRPC": 6, "admin": 4, "prefill node": 12, "decode node": 12}  # HTTP has 6
MORE = 4
CLOSED_S = 0.5  # for a server to close what it does not take


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (FILES, FILES))
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", MOST["admin"])


class Sockets:
    """Connections of one client."""

    def __init__(self, at: Listening) -> None:
        self._host, _, self._port = at.address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []

    async def kept(self, count: int, data: bytes = b"") -> int:
        """How many of ``count`` further ones the server keeps open."""
        return sum(await asyncio.gather(*(self._is_kept(data) for _ in range(count))))

    async def _is_kept(self, data: bytes) -> bool:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers.append(writer)
        writer.write(data)
        try:
            async with asyncio.timeout(CLOSED_S):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            return True
        except ConnectionError:
            pass
        return False

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        self._writers.clear()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_no_port_takes_more_than_it_has_files_for(tmp_path: Path, encrypted: bool) -> None:
    """Silent ones, and in the clear such as begin HTTP/2. Mutants: a server without the bound; a router's gRPC takes
    what HTTP has; operators have as many as nodes."""
    async with ports(tmp_path, encrypted=encrypted) as listening:
        for name, at in listening.items():
            sockets = Sockets(at)
            for data in (b"",) if encrypted else (b"", b"".join(begin()), b""):
                kept = await sockets.kept(MOST[name] + MORE, data)
                assert MOST[name] - 1 <= kept <= MOST[name], name  # a node's peer may have one
                await sockets.close()


async def test_who_finds_no_place_is_told_and_comes_in_later() -> None:
    """Mutant: places that do not come back."""
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        address = f"127.0.0.1:{server.port}"
        sockets = Sockets(Listening(address))
        assert await sockets.kept(MOST["router gRPC"]) == MOST["router gRPC"]
        async with AsyncClient(address, retries=0) as client:
            with pytest.raises(NodeUnavailable):
                await client.model_info()
        await sockets.close()
        async with AsyncClient(address, retries=0) as client:
            assert (await client.model_info()).model == "tiny"
        await server.stop(0)
