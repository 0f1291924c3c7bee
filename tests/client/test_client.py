"""The SDK over gRPC: every option arrives, streams are prompt, leaving one cancels it, a stop lets one finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import paceline.client
from cluster.frontdoor.service import SERVICE, GrpcServer, serve_grpc
from paceline.client import AsyncClient, Client, Overloaded, PacelineError
from paceline.client.convert import generate_request
from paceline.errors import NodeUnavailable as RootNodeUnavailable
from tests.support.scripted_nodes import Fleet, fleet, letters

TEXT = letters(5, 5, 64)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Fleet, GrpcServer, str]]:
    """A fleet behind gRPC, and its address."""
    async with fleet(**options) as made:
        server = await serve_grpc(made.router, "127.0.0.1:0")
        try:
            yield made, server, f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


async def blocking(address: str, use: Callable[[Client], Any]) -> Any:
    """Use the blocking client on a thread, since the server is on this loop."""

    def run() -> Any:
        with Client(address, timeout=10) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_option_arrives() -> None:
    options: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.1,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.7,
        "repetition_penalty": 1.1,
        "logit_bias": {5: -1.5},
        "seed": 2**64 - 1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "top_logprobs": 0,
    }
    async with served(tree="static") as (made, _, address), AsyncClient(address) as client:
        await client.generate([1, 2, 3], **options, num_draft_tokens=2, tree_width=3, tenant="t", stop="zzz")
        (sequence,) = made.nodes["decode-0"].sequences
        assert sequence.prompt_token_ids == (1, 2, 3)
        assert (sequence.speculation.num_draft_tokens, sequence.speculation.tree_width) == (2, 3)
        assert sequence.cache_salt == "t"
        for name, value in options.items():
            got = getattr(sequence.params, name)
            assert got == (tuple(value) if isinstance(value, list) else value), name


def test_a_priority_goes_with_the_request() -> None:
    assert generate_request("hi", {"priority": -3, "tenant": "t"}).priority == -3
    assert generate_request("hi", {"priority": None}).priority == 0


async def test_zero_temperature_is_not_unset_and_unset_is_one() -> None:
    async with served() as (made, _, address), AsyncClient(address) as client:
        await client.generate("a", max_tokens=1, temperature=0.0)
        await client.generate("a", max_tokens=1, temperature=None)
        assert [s.params.temperature for s in made.nodes["decode-0"].sequences] == [0.0, 1.0]


async def test_stream_brings_the_first_token_before_decode_moves() -> None:
    async with served() as (made, _, address), AsyncClient(address) as client:
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        async with asyncio.timeout(10), client.stream("hello", max_tokens=10, seed=5) as stream:
            first = await anext(stream)
            assert (first.text, first.first_index, first.round) == (TEXT[0], 0, None)
            gate.set()
            rest = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in rest) == TEXT[1:10]
        assert [chunk.round.num_accepted for chunk in rest if chunk.round] == [2, 2, 2]
        assert [chunk.completion is not None for chunk in rest] == [False] * (len(rest) - 1) + [True]


async def test_closing_a_stream_cancels_both_nodes_calls() -> None:
    async with served() as (made, _, address), AsyncClient(address) as client:
        for stage in ("prefill-0", "decode-0"):
            seen = made.nodes["decode-0"].cancelled
            made.nodes[stage].script.gate = asyncio.Event()
            stream = client.stream("hello", max_tokens=10)
            await until(lambda stage=stage: made.nodes[stage].active > 0)  # type: ignore[misc]
            await stream.aclose()
            await made.idle()
            assert made.nodes["decode-0"].cancelled == seen + 1
            assert made.nodes["prefill-0"].cancelled >= 1  # in the second round it may be done before
            made.nodes[stage].script.gate = None
        assert (await client.generate("hello", max_tokens=10, seed=5)).text == TEXT[:10]


@pytest.mark.parametrize("end", ["close", "drop", "with"])
async def test_leaving_a_blocking_stream_cancels_it(end: str) -> None:
    def leave(client: Client) -> None:
        stream = client.stream("hello", max_tokens=10, seed=5)
        assert next(stream).text == TEXT[0]
        if end == "close":
            stream.close()
            stream.close()
        elif end == "with":
            with stream:
                pass
        else:
            del stream
        deadline = time.monotonic() + 5
        while made.nodes["decode-0"].active and time.monotonic() < deadline:
            time.sleep(0.005)
        assert made.nodes["decode-0"].cancelled == 1  # while the connection is still open

    async with served() as (made, _, address):
        made.nodes["decode-0"].script.gate = asyncio.Event()
        await blocking(address, leave)
        await made.idle()


async def test_overload_says_when_to_come_back() -> None:
    async with served() as (made, _, address), AsyncClient(address) as client:
        made.nodes["decode-0"].script.errors = [Overloaded("full", 2.5)]
        with pytest.raises(Overloaded) as caught:
            await client.generate("hello")
        assert caught.value.retry_after_s == 2.5


async def test_stopping_lets_streams_finish_and_does_not_wait_for_watchers() -> None:
    async with fleet() as made:
        server = await serve_grpc(made.router, "127.0.0.1:0")
        address = f"127.0.0.1:{server.port}"
        made.nodes["decode-0"].script.round_pause_s = 0.2  # 0.6 s in all, well over what the server alone would wait
        async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stream = client.stream("hello", max_tokens=10, seed=5)
            text = (await anext(stream)).text
            stopping = asyncio.create_task(server.stop(60))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            text += "".join([chunk.text async for chunk in stream])
            async with asyncio.timeout(30):
                await stopping
        assert text == TEXT[:10]


def test_all_is_what_there_is() -> None:
    for name in paceline.client.__all__:
        assert hasattr(paceline.client, name), name
    assert sorted(paceline.client.__all__) == paceline.client.__all__
    assert paceline.client.NodeUnavailable is RootNodeUnavailable
    errors = [vars(paceline.client)[name] for name in paceline.client.__all__]
    errors = [kind for kind in errors if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(errors) == 13
    assert all(issubclass(kind, PacelineError) for kind in errors)
