"""The SDK with several routers: one of them dies, the user sees one continuous stream."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import redis

from cluster.frontdoor.service import serve_grpc
from paceline.client import (
    AsyncClient,
    Chunk,
    Client,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
    RequestCancelled,
    failover,
)
from paceline.client.failover import Patience, Routers
from paceline.client.progress import StreamProgress
from paceline.request import derive_seed
from paceline.v1 import inference_pb2
from tests.fakes.redis_servers import Embedded
from tests.support.scripted_nodes import Fleet, fleet, letters
from tests.support.two_routers import One, Two, scripted, two_routers

TEXT = letters(5, 5, 64)
PROCESS = Path(__file__).with_name("router_process.py")
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Embedded]:
    with Embedded() as made:
        yield made


@asynccontextmanager
async def routers(url: str, round_size: int = 1, **options: Any) -> AsyncIterator[tuple[Fleet, Two]]:
    async with fleet(**options) as nodes:
        nodes.nodes["decode-0"].script.round_size = round_size
        async with two_routers(scripted(nodes), nodes.router.config, url) as two:
            yield nodes, two
        await nodes.idle()


def joined(chunks: list[Chunk], choice: int = 0) -> tuple[str, bytes, int]:
    """Text, tokens and number of logprobs of a choice; every index must be there once, its completion last."""
    own = [chunk for chunk in chunks if chunk.choice == choice]
    index = 0
    for chunk in own:
        assert chunk.first_index == index
        index += len(chunk.token_ids)
    assert [chunk.completion is not None for chunk in own] == [False] * (len(own) - 1) + [True]
    assert own[-1].completion is not None
    assert own[-1].completion.usage.completion_tokens == index
    tokens = bytes(token_id for chunk in own for token_id in chunk.token_ids)
    return "".join(chunk.text for chunk in own), tokens, sum(len(chunk.logprobs) for chunk in own)


async def collected(client: AsyncClient, got: list[Chunk] | None = None, **options: Any) -> list[Chunk]:
    """All chunks; ``got`` has them as they come."""
    got = [] if got is None else got
    async with asyncio.timeout(20), client.stream("hello", **({"max_tokens": 12, "seed": 5} | options)) as stream:
        async for chunk in stream:
            got.append(chunk)
    return got


async def dies(one: One, got: list[Chunk], upto: int) -> None:
    """Once it has stalled and its client has so many chunks: what is under way when a connection breaks may be lost."""
    await one.router.stalled.wait()
    while len(got) < upto:
        await asyncio.sleep(0.005)
    await one.die()


async def with_death(two: Two, upto: int, reading: Any, got: list[Chunk] | None = None) -> Any:
    """The result of ``reading``, with the first router dead after ``upto`` chunks; once they came, where ``got`` is
    what came."""
    two.a.router.stall_after = upto
    dying = asyncio.create_task(two.a.die_when_stalled() if got is None else dies(two.a, got, upto))
    try:
        return await reading
    finally:
        assert two.a.router.stalled.is_set()  # or the test would prove nothing
        await dying


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("upto", range(13))
async def test_a_router_dies_at_every_index(redis_server: Embedded, upto: int, journal: bool) -> None:
    async with routers(redis_server.url if journal else "") as (_, two), AsyncClient(two.addresses) as client:
        got: list[Chunk] = []
        chunks = await with_death(two, upto, collected(client, got, top_logprobs=1), got)
        assert joined(chunks) == (TEXT[:12], TEXT[:12].encode(), 12)
        assert (await client.generate("hello", max_tokens=3, seed=5)).text == TEXT[:3]  # at the second router now


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("upto", range(5))
async def test_log_probabilities_of_the_prompt_come_once(
    redis_server: Embedded, upto: int, max_tokens: int, journal: bool
) -> None:
    """In two messages, then the tokens, then the end."""
    expected = tuple(-float(i) for i in range(1, 5))
    upto = min(upto, 2 + max_tokens)
    async with routers(redis_server.url if journal else "") as (_, two), AsyncClient(two.addresses) as client:
        got: list[Chunk] = []
        chunks = await with_death(two, upto, collected(client, got, max_tokens=max_tokens, prompt_logprobs=0), got)
        assert joined(chunks) == (TEXT[:max_tokens], TEXT[:max_tokens].encode(), 0)
        assert tuple(entry.logprob for chunk in chunks for entry in chunk.prompt_logprobs) == expected


@pytest.mark.parametrize("upto", [0, 1, 5, 12])
async def test_the_blocking_client(redis_server: Embedded, upto: int) -> None:
    async with routers(redis_server.url) as (_, two):

        def use() -> list[Chunk]:
            with Client(two.addresses, timeout=20) as client:
                with client.stream("hello", max_tokens=12, seed=5) as stream:
                    chunks = list(stream)
                assert client.generate("hello", max_tokens=3, seed=5).text == TEXT[:3]
                return chunks

        chunks = await with_death(two, upto, asyncio.to_thread(use))
        assert joined(chunks) == (TEXT[:12], TEXT[:12].encode(), 0)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("upto", [0, 2, 7, 13])
async def test_several_choices_with_a_stop_string_and_a_drawn_seed(
    redis_server: Embedded, upto: int, journal: bool
) -> None:
    url = redis_server.url if journal else ""
    async with routers(url, round_size=2) as (nodes, two), AsyncClient(two.addresses) as client:
        got: list[Chunk] = []
        chunks = await with_death(two, upto, collected(client, got, n=3, seed=None, stop="zz"), got)
        seed = next(c.completion.seed for c in chunks if c.choice == 0 and c.completion is not None)
        for i in range(3):
            assert joined(chunks, i)[0] == letters(derive_seed(seed, i), 5, 12)
        if upto:  # before the first chunk, and with no journal yet, another seed is as good
            seeds = {s.params.seed for s in nodes.nodes["decode-0"].sequences}
            assert seeds == {derive_seed(seed, i) for i in range(3)}


async def test_one_death_after_another_with_a_chunk_between() -> None:
    async with routers("") as (nodes, two):
        third = await serve_grpc(nodes.router, "127.0.0.1:0")
        two.a.router.stall_after = two.b.router.stall_after = 3
        addresses = [*two.addresses, f"127.0.0.1:{third.port}"]
        async with AsyncClient(addresses, retries=1) as client:
            got: list[Chunk] = []
            deaths = [asyncio.create_task(dies(one, got, upto)) for one, upto in ((two.a, 3), (two.b, 6))]
            assert joined(await collected(client, got))[0] == TEXT[:12]
            await asyncio.gather(*deaths)
        assert [len(s.output_token_ids) for s in nodes.nodes["decode-0"].sequences] == [0, 3, 6]
        await third.stop(0)


@pytest.mark.parametrize("upto", [4, 5, 6, 7])
async def test_a_stop_string_across_the_cut(redis_server: Embedded, upto: int) -> None:
    async with routers(redis_server.url) as (_, two), AsyncClient(two.addresses) as client:
        got: list[Chunk] = []
        chunks = await with_death(two, upto, collected(client, got, stop=TEXT[4:7]), got)
        assert joined(chunks)[:2] == (TEXT[:4], TEXT[:7].encode())


@pytest.mark.parametrize(("upto", "number"), [(0, signal.SIGKILL), (5, signal.SIGKILL), (5, signal.SIGSTOP)])
async def test_a_router_process_is_killed_or_stopped(redis_server: Embedded, upto: int, number: signal.Signals) -> None:
    """Mutant: `FAILOVER_OPTIONS` are those of a client with one address, which notices after 30 s."""
    async with routers(redis_server.url) as (nodes, two):
        command = [sys.executable, str(PROCESS), redis_server.url, str(upto)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(record.to_json() for record in nodes.registry.nodes()),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(PROCESS.parents[2])},
        )
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 60))
        async with AsyncClient([f"127.0.0.1:{port}", two.b.address]) as client:
            got: list[Chunk] = []
            reading = asyncio.create_task(collected(client, got, seed=None, temperature=0.7))
            assert await asyncio.wait_for(process.stdout.readline(), 10) == b"stalled\n"
            while len(got) < upto:
                await asyncio.sleep(0.005)
            process.send_signal(number)
            async with asyncio.timeout(10):
                chunks = await reading
        if number is signal.SIGSTOP:
            process.kill()
        assert await process.wait() == -signal.SIGKILL
        assert chunks[-1].completion is not None
        assert joined(chunks)[0] == letters(chunks[-1].completion.seed, 5, 12)
        first, second = nodes.nodes["decode-0"].sequences
        assert first.params == second.params  # the seed that the dead router drew
        assert len(second.output_token_ids) == upto


async def test_only_the_end_of_the_stream_was_lost(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two), AsyncClient(two.addresses) as client:
        stream = client.stream("hello", max_tokens=3, seed=5)
        chunks = [await anext(stream) for _ in range(4)]
        assert joined(chunks)[0] == TEXT[:3]
        stream._open = lambda request: pytest.fail("nothing is left to ask for")  # type: ignore[method-assign]
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        with pytest.raises(StopAsyncIteration):
            await stream._go_on_after(error)


async def test_a_single_address_where_a_router_comes_back() -> None:
    async with routers("") as (nodes, two), AsyncClient(two.a.address) as client:
        two.a.router.stall_after = 4
        reading = asyncio.create_task(collected(client))
        await two.a.router.stalled.wait()
        address = two.a.address
        await two.a.die()
        await asyncio.sleep(0.3)
        router = scripted(nodes)(journal=None)
        server = await serve_grpc(router, address)
        assert joined(await reading)[0] == TEXT[:12]
        await server.stop(0)
        await router.close()


async def test_the_first_router_is_not_there() -> None:
    async with routers("") as (_, two), AsyncClient([NOWHERE, two.b.address]) as client:
        assert joined(await collected(client))[0] == TEXT[:12]
        assert client._routers.current[0] == 1
    async with routers("") as (_, two), AsyncClient([NOWHERE, two.b.address]) as client:
        assert (await client.generate("hello", max_tokens=3, seed=5)).text == TEXT[:3]
        assert (await client.model_info()).model == "tiny"


async def test_nobody_is_there() -> None:
    started = time.monotonic()
    async with AsyncClient([NOWHERE, NOWHERE]) as client:
        with pytest.raises(NodeUnavailable):
            await collected(client)
        with pytest.raises(NodeUnavailable):
            await client.tokenize("hello")

    def use() -> None:
        with Client([NOWHERE, NOWHERE]) as blocking:
            with pytest.raises(NodeUnavailable):
                list(blocking.stream("hello"))
            with pytest.raises(NodeUnavailable):
                blocking.tokenize("hello")

    await asyncio.to_thread(use)
    assert time.monotonic() - started < 5
    with pytest.raises(ValueError, match="address"):
        AsyncClient([])


@pytest.mark.parametrize(("retries", "timeout", "least", "most"), [(3, 20.0, 0.15, 4.0), (8, 3.0, 0.0, 6.0)])
async def test_tries_and_time_are_bounded(retries: int, timeout: float, least: float, most: float) -> None:
    async with routers("") as (_, two), AsyncClient(two.addresses, retries=retries) as client:
        two.a.router.stall_after = 3
        stream = client.stream("hello", max_tokens=12, seed=5, timeout=timeout)
        for _ in range(3):
            await anext(stream)
        await two.a.die()
        await two.b.die()
        started = time.monotonic()
        with pytest.raises(NodeUnavailable):
            await anext(stream)
        assert least <= time.monotonic() - started < most


async def test_a_stream_that_cannot_be_resumed_says_why(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two), AsyncClient(two.addresses) as client:
        two.a.router.stall_after = 3
        stream = client.stream("hello", max_tokens=12, seed=5)
        for _ in range(3):
            await anext(stream)
        stream._progress.request.text = "jello"  # as when its chat template has the time of day in it
        await two.a.die()  # first: it may be about to write to the journal
        with redis.Redis.from_url(redis_server.url) as server:
            server.flushall()
        with pytest.raises(NodeUnavailable, match="cannot be resumed"):
            await anext(stream)


async def test_a_full_router_is_waited_for_when_a_stream_goes_on(redis_server: Embedded) -> None:
    small = {"max_inflight": 1, "max_queued": 0}
    async with routers(redis_server.url, **small) as (_, two), AsyncClient(two.addresses) as client:
        place = two.b.router._admission.enter(1)
        with pytest.raises(Overloaded):
            async with AsyncClient(two.b.address) as direct:
                await collected(direct)
        reading = asyncio.create_task(with_death(two, 4, collected(client)))
        await two.a.router.stalled.wait()
        await asyncio.sleep(0.3)
        assert not reading.done()
        two.b.router._admission.leave(place)
        assert joined(await reading)[0] == TEXT[:12]


async def test_bad_input_is_not_tried_elsewhere() -> None:
    async with routers("") as (_, two), AsyncClient(two.addresses) as client:
        with pytest.raises(InvalidRequest):
            await collected(client, temperature=-1.0)
        assert client._routers.current[0] == 0


async def test_closing_while_it_reconnects() -> None:
    async with routers("") as (_, two), AsyncClient(two.a.address) as client:
        two.a.router.stall_after = 1
        stream = client.stream("hello", max_tokens=12, seed=5)
        await anext(stream)
        await two.a.die()
        waiting = asyncio.ensure_future(anext(stream))
        while not stream._patience._failures:  # then it pauses before its next try
            await asyncio.sleep(0.005)
        await stream.aclose()
        with pytest.raises((RequestCancelled, asyncio.CancelledError)):
            await waiting


def test_a_gap_or_a_repetition_is_not_handed_out() -> None:
    received = StreamProgress(inference_pb2.GenerateRequest(text="hello"))
    received.take(inference_pb2.GenerateChunk(token_ids=[1, 2]))
    for wrong in (0, 1, 3):
        with pytest.raises(PacelineError, match="not 2"):
            received.take(inference_pb2.GenerateChunk(first_index=wrong, token_ids=[7]))
    received.take(inference_pb2.GenerateChunk(first_index=2, completion=inference_pb2.Completion()))
    assert received.complete
    with pytest.raises(PacelineError):
        received.take(inference_pb2.GenerateChunk(first_index=2, token_ids=[7]))
    assert len({StreamProgress(inference_pb2.GenerateRequest()).request.generation_id for _ in range(100)}) == 100


class Failure(grpc.RpcError):
    """A call that failed."""

    def __init__(self, code: grpc.StatusCode, told: bool = False) -> None:
        self._code, self._told = code, told

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "told to"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]  # pairs do
        return (("retry-after-ms", "1500"), *([("paceline-told", "1")] if self._told else []))


def test_pauses() -> None:
    lost, full = Failure(grpc.StatusCode.UNAVAILABLE), Failure(grpc.StatusCode.RESOURCE_EXHAUSTED)
    patience = Patience(routers=2, retries=8, timeout_s=100, rng=random.Random(1))
    pauses = [patience.pause_s(lost, started=True) for _ in range(8)]
    assert pauses[0] == 0
    assert all(
        most / 2 <= pause <= most for pause, most in zip(pauses[1:], [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2], strict=True)
    )
    other = Patience(routers=2, retries=8, timeout_s=100, rng=random.Random(2))
    assert [other.pause_s(lost, started=True) for _ in range(8)][1:] != pauses[1:]  # mutant: no chance in it
    with pytest.raises(NodeUnavailable):
        patience.pause_s(lost, started=True)
    patience.progressed()
    assert 1.5 <= patience.pause_s(full, started=True) <= 2.25
    with pytest.raises(NodeUnavailable, match="told to"):
        Patience(2, 8, timeout_s=0.05).pause_s(Failure(grpc.StatusCode.NOT_FOUND), started=True)
    short = Patience(1, 8, timeout_s=0.05)
    with pytest.raises(NodeUnavailable):
        short.pause_s(lost, started=True)  # the pause would outlast the call
    for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED):
        with pytest.raises(PacelineError):
            Patience(2, 8, 100).pause_s(Failure(code), started=True)
    with pytest.raises(Overloaded):
        Patience(2, 8, 100).pause_s(full, started=False)
    assert failover.FIRST_PAUSE_S < failover.LONGEST_PAUSE_S


def test_a_call_that_broke_at_work_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first chunk, at more than each router. Mutants: so is one that a router ended with an error, or
    refused after a wait."""
    now = [0.0]
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lost, told = Failure(grpc.StatusCode.UNAVAILABLE), Failure(grpc.StatusCode.UNAVAILABLE, told=True)
    patience = Patience(routers=2, retries=8, timeout_s=100)
    for _ in range(8):
        now[0] += 5.0
        patience.pause_s(lost, started=False)
    for error, lasted in ((lost, 0.1), (told, 5.0)):
        patience = Patience(routers=2, retries=8, timeout_s=100)
        now[0] += lasted
        patience.pause_s(error, started=False)
        now[0] += lasted
        with pytest.raises(NodeUnavailable):
            patience.pause_s(error, started=False)
    patience = Patience(routers=2, retries=8, timeout_s=100)
    patience.pause_s(lost, started=False)
    now[0] += 30.0  # the line of the other one is full, and was waited in
    with pytest.raises(Overloaded):
        patience.pause_s(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED), started=False)


def test_one_failure_moves_on_once() -> None:
    routers: Routers[str] = Routers(["a", "b", "c"], lambda address: address, lambda channel: channel.upper())
    assert routers.current == (0, "A")
    routers.failed(0)
    routers.failed(0)  # another call on the same router, later
    assert routers.current == (1, "B")
    routers.failed(1)
    routers.failed(2)
    assert routers.current == (0, "A")
