"""Routers that answer nothing any more, behind connections that nobody closes. gRPC's own pings are off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from paceline.client import AsyncClient, Client, watch
from paceline.client.sync import ChunkStream
from tests.client.test_failover import TEXT, collected, joined, routers

NO_PINGS = [  # that could find it; those that measure the bandwidth have a time of their own
    ("grpc.keepalive_time_ms", 2**31 - 1),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
]


class Cable:
    """Passes bytes to a router, until it is cut in silence."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.whole = asyncio.Event()
        self.whole.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, to]
        self._tasks += [asyncio.create_task(self._pass(*ends)) for ends in ((reader, to), (there, writer))]

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.whole.wait()
                writer.write(data)
            await self.whole.wait()
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def cable_to(address: str) -> AsyncIterator[tuple[Cable, str]]:
    cable = Cable(address)
    server = await asyncio.start_server(cable.joined, "127.0.0.1", 0)
    try:
        yield cable, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await cable.close()
        server.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENT_S", 0.1)
    monkeypatch.setattr(watch, "ANSWER_S", 0.3)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_router_that_answers_nothing_is_left(blocking: bool) -> None:
    """Mutant: nobody asks it; the stream then waits for its deadline of 10 s."""
    async with routers("") as (_, two), cable_to(two.a.address) as (cable, address):
        two.a.router.stall_after = 4

        def all_of_it() -> str:
            with Client([address, two.b.address], options=NO_PINGS, timeout=10) as client:
                return "".join(chunk.text for chunk in client.stream("hello", max_tokens=12, seed=5))

        async with AsyncClient([address, two.b.address], options=NO_PINGS, timeout=10) as client:
            reading = asyncio.create_task(asyncio.to_thread(all_of_it) if blocking else text_of(client))
            await two.a.router.stalled.wait()
            await asyncio.sleep(0.02)  # until what was told has come
            cable.whole.clear()
            assert await reading == TEXT[:12]


async def text_of(client: AsyncClient) -> str:
    return joined(await collected(client))[0]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_router_that_works_for_long_is_not_left(blocking: bool) -> None:
    """Mutant: silence alone is taken for death."""
    async with routers("") as (nodes, two):
        two.a.router.stall_after = 4
        async with AsyncClient(two.addresses, options=NO_PINGS) as client:
            with Client(two.addresses, options=NO_PINGS) as other:
                stream = (other if blocking else client).stream("hello", max_tokens=12, seed=5)
                for _ in range(4):
                    await (asyncio.to_thread(next, stream) if isinstance(stream, ChunkStream) else anext(stream))
                waiting = asyncio.ensure_future(
                    asyncio.to_thread(next, stream) if isinstance(stream, ChunkStream) else anext(stream)
                )
                await asyncio.sleep(1.0)
                assert not waiting.done()
                assert len(nodes.nodes["decode-0"].sequences) == 1
                await (asyncio.to_thread(stream.close) if isinstance(stream, ChunkStream) else stream.aclose())
                await asyncio.gather(waiting, return_exceptions=True)


def test_who_left_a_silent_router_grants_the_next_one_more_for_a_while() -> None:
    """Mutants: the time never grows; it has no bound; it stays long for good."""
    place = watch.Place()
    found = []
    for router in range(6):
        place.enter(router, SimpleNamespace(cancel=lambda: None))
        found.append(round(place.answer_s / watch.ANSWER_S))
        place.leave()
    assert found == [1, 2, 4, 8, 8, 8]
    place.enter(0, None)
    place.entered_at -= watch.CALM_S
    assert place.answer_s == watch.ANSWER_S
