"""The SDK and the gRPC service, over a real port, in front of scripted nodes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import paceline.client
from cluster.frontdoor.service import SERVICE, serve_grpc
from paceline.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    TokenLogprobs,
)
from paceline.errors import ConfigError
from paceline.request import derive_seed
from paceline.v1 import inference_pb2, inference_pb2_grpc
from tests.support.byte_text import VOCAB
from tests.support.scripted_nodes import MAX_MODEL_LEN, Fleet, fleet, letters

TEXT = letters(5, 5, 40)


@dataclass
class Served:
    nodes: Fleet
    address: str


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Served]:
    async with fleet(**options) as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        try:
            yield Served(nodes, f"127.0.0.1:{server.port}")
        finally:
            await server.stop(0)


def test_the_import_is_light() -> None:
    heavy = "torch ray pydantic numpy redis fastapi tokenizers jinja2"
    code = f"import sys, paceline.client; print([m for m in {heavy.split()!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_all_is_there_and_sorted() -> None:
    names = paceline.client.__all__
    assert names == sorted(names)
    assert all(hasattr(paceline.client, name) for name in names)


async def test_generate() -> None:
    async with served() as made, AsyncClient(made.address) as client:
        result = await client.generate("hello", max_tokens=10, seed=5, top_logprobs=2, n=2, request_id="mine")
        assert (result.request_id, result.model, len(result.choices)) == ("mine", "tiny", 2)
        assert (result.text, bytes(result.token_ids).decode()) == (TEXT[:10], TEXT[:10])
        assert result.choices[1].text == letters(derive_seed(5, 1), 5, 10)
        assert len(result.choices[0].logprobs) == 10
        first = result.token_ids[0]
        assert result.choices[0].logprobs[0] == TokenLogprobs(-0.5, (first, first + 1), (-0.5, -1.5))
        done = result.completion
        assert done.finish_reason is FinishReason.LENGTH
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 10)
        assert done.speculation.acceptance_length == pytest.approx(3.0)
        assert done.speculation.accepted_per_round == (2, 2, 2)
        assert (done.handoff.target_kv, done.handoff.draft_kv, done.handoff.hidden, done.handoff.meta) == (
            *(1000, 100, 10),
            1,
        )
        assert (done.nodes.prefill, done.nodes.decode, done.seed) == ("prefill-0", "decode-0", 5)
        assert 0 < done.timing.ttft_s <= done.timing.e2e_s


async def test_stream_chat_token_ids_tokenize_and_info() -> None:
    async with served() as made, AsyncClient(made.address) as client:
        chunks = [chunk async for chunk in client.stream(list(b"hello"), max_tokens=10, seed=5, stop=TEXT[8])]
        assert "".join(chunk.text for chunk in chunks) == TEXT[: TEXT.index(TEXT[8])]
        assert chunks[-1].completion is not None
        assert chunks[1].round is not None
        messages = [{"role": "user", "content": "hi"}]
        tokens = await client.tokenize(messages)
        assert (tokens.token_ids, tokens.max_model_len) == (tuple(b"<user>hi<assistant>"), MAX_MODEL_LEN)
        assert (await client.tokenize("hé")).token_ids == tuple("hé".encode())
        chat = await client.chat(messages, max_tokens=3, seed=5)
        assert chat.text == letters(5, len(tokens.token_ids), 3)
        info = await client.model_info()
        assert (info.model, info.vocab_size, info.max_model_len, info.bit_exact) == ("tiny", VOCAB, MAX_MODEL_LEN, True)
        assert [node.id for node in info.nodes] == ["decode-0", "prefill-0"]


async def test_the_blocking_client() -> None:
    async with served() as made:

        def use() -> None:
            with Client(made.address, timeout=10) as client:
                assert client.generate("hello", max_tokens=10, seed=5).text == TEXT[:10]
                with client.stream("hello", max_tokens=10, seed=5) as stream:
                    assert "".join(chunk.text for chunk in stream) == TEXT[:10]
                assert client.model_info().model == "tiny"
                assert client.tokenize("a").token_ids == (97,)
                assert client.chat([{"role": "user", "content": "x"}], max_tokens=1).completion.usage.prompt_tokens > 1
                with pytest.raises(InvalidRequest) as caught:
                    next(client.stream("hello", temperature=-1.0))
                assert caught.value.field == "temperature"

        await asyncio.to_thread(use)


async def test_closing_or_dropping_a_stream_cancels() -> None:
    async with served() as made, AsyncClient(made.address) as client:
        gate = made.nodes.nodes["decode-0"].script.gate = asyncio.Event()
        stream = client.stream("hello", max_tokens=10, seed=5)
        assert (await anext(stream)).text == TEXT[0]
        await stream.aclose()
        await made.nodes.idle()
        async with client.stream("hello", max_tokens=10, seed=5) as stream:
            await anext(stream)
        await made.nodes.idle()
        stream = client.stream("hello", max_tokens=10, seed=5)
        await anext(stream)
        del stream
        await made.nodes.idle()
        assert made.nodes.nodes["decode-0"].cancelled == 3

        def block() -> None:
            with Client(made.address) as blocking:
                held = blocking.stream("hello", max_tokens=10, seed=5)
                next(held)
                held.close()

        await asyncio.to_thread(block)
        await made.nodes.idle()
        assert made.nodes.nodes["decode-0"].cancelled == 4
        gate.set()
        assert (await client.generate("hello", max_tokens=10, seed=5)).text == TEXT[:10]


BAD: list[tuple[str, Any, dict[str, Any]]] = [
    ("prompt", "", {}),
    ("prompt", [], {}),
    ("prompt", [1, 300], {}),
    ("prompt", "x" * MAX_MODEL_LEN, {}),
    ("model", "hello", {"model": "other"}),
    ("messages", [{"role": "robot", "content": ""}], {}),
    ("temperature", "hello", {"temperature": float("nan")}),
    ("top_p", "hello", {"top_p": 1.5}),
    ("max_tokens", "hello", {"max_tokens": -1}),
    ("max_tokens", "hello", {"max_tokens": -1}),
    ("n", "hello", {"n": 129}),
    ("logit_bias", "hello", {"logit_bias": {1: 500.0}}),
    ("stop", "hello", {"stop": [""]}),
    ("speculation.num_draft_tokens", "hello", {"num_draft_tokens": -1}),
]


async def test_bad_input_names_its_field_and_the_next_request_works() -> None:
    async with served() as made, AsyncClient(made.address) as client:
        for field, prompt, options in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(prompt, **options)
            assert caught.value.field == field
            with pytest.raises(InvalidRequest) as caught:
                [_ async for _ in client.stream(prompt, **options)]
            assert caught.value.field == field
        assert (await client.generate("hello", max_tokens=10, seed=5)).text == TEXT[:10]


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda c: c.generate("x", temprature=1.0), TypeError),
        (lambda c: c.generate("x", temperature="warm"), TypeError),
        (lambda c: c.generate("x", seed=-1), ValueError),
        (lambda c: c.generate([{"role": "user", "content": "x", "nmae": "y"}]), TypeError),
    ],
)
async def test_misuse_is_told_before_anything_is_sent(use: Callable[[Any], Any], error: type[Exception]) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(error):
            await use(client)


async def test_a_message_without_prompt_and_one_of_100_mb() -> None:
    async with served() as made, grpc.aio.insecure_channel(made.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata() or {})["paceline-field"] == "prompt"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest())
        assert dict(caught.value.trailing_metadata() or {})["paceline-field"] == "input"
        huge = inference_pb2.GenerateRequest(text="x" * 100_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(huge, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with AsyncClient(made.address) as client:
            with pytest.raises(InvalidRequest, match="too large"):
                await client.generate("x" * 5_000_000)
            assert (await client.generate("hello", max_tokens=10, seed=5)).text == TEXT[:10]


async def test_overload_deadline_and_nobody_there() -> None:
    async with served(max_inflight=1, max_queued=0, queue_timeout_s=0.5) as made, AsyncClient(made.address) as client:
        gate = made.nodes.nodes["decode-0"].script.gate = asyncio.Event()
        running = asyncio.create_task(client.generate("hello", max_tokens=10, seed=5))
        while not made.nodes.router.inflight:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded) as caught:
            await client.generate("hello")
        assert caught.value.retry_after_s == 1.0
        gate.set()
        assert (await running).text == TEXT[:10]
        made.nodes.nodes["decode-0"].script.gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await client.generate("hello", timeout=0.2)
        await made.nodes.idle()
        made.nodes.registry.records.clear()
        with pytest.raises(NodeUnavailable):
            await client.generate("hello")
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(NodeUnavailable):
            await client.generate("hello", timeout=5)


async def test_a_client_killed_mid_stream_frees_its_nodes() -> None:
    async with served() as made:
        made.nodes.nodes["decode-0"].script.gate = asyncio.Event()
        code = (
            "import sys, paceline.client as c\n"
            "stream = c.Client(sys.argv[1]).stream('hello', max_tokens=10)\n"
            "print(next(stream).text, flush=True)\n"
            "next(stream)\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, made.address, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30)
        process.kill()
        await process.wait()
        await made.nodes.idle()
        assert made.nodes.nodes["decode-0"].cancelled == 1


async def test_health_reflection_and_a_bounded_stop() -> None:
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = [service.name async for reply in call for service in reply.list_services_response.service]
            assert SERVICE in listed
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            async with asyncio.timeout(15):  # an open watch does not hold the stop up
                await server.stop(30)
            watch.cancel()
        threads = [thread.name for thread in threading.enumerate() if "grpc" in thread.name and not thread.daemon]
        assert threads == []


async def test_stop_lets_requests_finish() -> None:
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        nodes.nodes["decode-0"].script.round_pause_s = 0.05
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            running = asyncio.create_task(client.generate("hello", max_tokens=10, seed=5))
            while not nodes.router.inflight:
                await asyncio.sleep(0.005)
            await server.stop(5)
            assert (await running).text == TEXT[:10]


async def test_an_address_that_is_taken() -> None:
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        with pytest.raises(ConfigError) as caught:
            await serve_grpc(nodes.router, f"127.0.0.1:{server.port}")
        assert caught.value.key == "grpc"
        await server.stop(0)
