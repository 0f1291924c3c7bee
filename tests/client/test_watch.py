"""Routers that answer nothing any more, behind connections that nobody closes. gRPC's own pings are off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.client import AsyncClient, Client, watch
from paceline.client.sync import ChunkStream
from paceline.client.watch import AsyncWatch, Place, Watch
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


@dataclass
class Health:
    """A router's health service. It answers once ``answers`` is set."""

    asked: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def check(self, request: bytes, context: Any) -> bytes:
        self.asked += 1
        await self.answers.wait()
        return b""


@asynccontextmanager
async def watching(blocking: bool) -> AsyncIterator[tuple[Health, AsyncWatch | Watch]]:
    health, server = Health(), grpc.aio.server()
    methods: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(health.check)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels: list[Any] = [(grpc if blocking else grpc.aio).insecure_channel(address) for _ in range(2)]
    watched = Watch(channels) if blocking else AsyncWatch(channels)
    try:
        yield health, watched
    finally:
        await asyncio.to_thread(watched.close) if isinstance(watched, Watch) else await watched.close()
        for channel in channels:
            await asyncio.to_thread(channel.close) if blocking else await channel.close()
        await server.stop(None)


def waiting(watched: AsyncWatch | Watch, left: int = 0) -> Place:
    """A stream that waits at the first router, after it left so many."""
    place = Place(left=left)
    place.enter(0, SimpleNamespace(cancel=lambda: None))
    place.since = monotonic()
    watched.add(place)
    return place


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_router_that_is_late_to_answer_keeps_those_that_it_need_not_lose(blocking: bool) -> None:
    """Mutants: what other streams were told meanwhile says nothing, so all streams of a busy router come down on the
    next one together; a stream that grants more time is left with one that does not."""
    async with watching(blocking) as (_, watched):
        place = waiting(watched)
        for _ in range(8):
            await asyncio.sleep(0.07)
            watched.heard(0)
        assert not place.silent
        patient = waiting(watched, left=watch.DOUBLINGS)
        await asyncio.sleep(0.6)
        assert (place.silent, patient.silent) == (True, False)


@pytest.mark.parametrize("blocking", [False, True])
async def test_many_streams_ask_no_more_than_one(blocking: bool) -> None:
    """Mutant: an answer holds for the stream alone that asked."""
    async with watching(blocking) as (health, watched):
        health.answers.set()
        places = []
        for _ in range(30):
            places.append(waiting(watched))
            await asyncio.sleep(0.02)
        assert 2 <= health.asked <= 8
        assert not any(place.silent for place in places)
