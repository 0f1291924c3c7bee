"""What the public gRPC service says to messages that are wrong: which field, and what is allowed. Over a real port, as
bytes where no client library would write them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cluster.contract.generation import MAX_MESSAGES, MAX_STOP_TOKEN_IDS
from cluster.frontdoor.service import SERVICE, serve_grpc
from paceline.request import MAX_N, MAX_STOP_STRINGS
from paceline.rpc.wire_errors import FIELD_KEY
from paceline.v1 import common_pb2, inference_pb2, trace_pb2
from tests.support.byte_text import VOCAB
from tests.support.scripted_nodes import fleet

GENERATE, TOKENIZE, TRACE = (f"/paceline.v1.Inference/{name}" for name in ("Generate", "Tokenize", "Trace"))
STREAM = "/paceline.v1.Inference/GenerateStream"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GOOD = inference_pb2.GenerateRequest(text="hello", sampling=common_pb2.SamplingParams(max_tokens=3, seed=5))
BIG = [("grpc.max_send_message_length", 64 << 20)]


@asynccontextmanager
async def channel() -> AsyncIterator[Any]:
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=BIG) as opened:
                yield opened
            assert nodes.router.inflight == 0
        finally:
            await server.stop(0)


async def refused(opened: Any, path: str, data: bytes) -> tuple[grpc.StatusCode, str, str]:
    """Code, field and details of a refusal."""
    call = opened.unary_stream(path)(data).read() if path == STREAM else opened.unary_unary(path)(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    field = dict(caught.value.trailing_metadata() or ()).get(FIELD_KEY, "")
    return caught.value.code(), str(field), caught.value.details() or ""


def generate(**fields: Any) -> bytes:
    return inference_pb2.GenerateRequest(**({"text": "hello"} | fields)).SerializeToString()


def sampling(**fields: Any) -> bytes:
    return generate(sampling=common_pb2.SamplingParams(**({"max_tokens": 3} | fields)))


@pytest.mark.parametrize(
    ("path", "data", "field", "says"),
    [
        (GENERATE, b"\xff", "request", "is not a paceline.v1.GenerateRequest"),
        (STREAM, b"\x0a\x05ab", "request", "is not a paceline.v1.GenerateRequest"),
        (GENERATE, b"\x0a\x01\xff", "text", "is not valid UTF-8"),
        (GENERATE, b"\x1a\x06\x0a\x04\x12\x02\xc3(", "chat.messages.content", "is not valid UTF-8"),
        (STREAM, b"\x0a\x01a\x2a\x03\x52\x01\x80", "sampling.stop", "is not valid UTF-8"),
        (TRACE, b"\x08\x01\x0a\x01\xff", "request_id", "is not valid UTF-8"),
        (HEALTH, b"\x0a\x01\xff", "service", "is not valid UTF-8"),
    ],
)
async def test_bytes_that_are_no_message(path: str, data: bytes, field: str, says: str) -> None:
    """gRPC's own answer is UNKNOWN."""
    async with channel() as opened:
        code, named, details = await refused(opened, path, data)
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert says in details
        good = await opened.unary_unary(GENERATE)(GOOD.SerializeToString())
        assert len(inference_pb2.GenerateResponse.FromString(good).choices[0].token_ids) == 3


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (GENERATE, b"\x98\x06\x07", "field 99"),
        (STREAM, b"\x98\x06\x07", "field 99"),
        (GENERATE, b"\x2a\x03\x98\x06\x07", "sampling.field 99"),
        (GENERATE, b"\x1a\x05\x0a\x03\x98\x06\x07", "chat.messages.field 99"),
        (TRACE, b"\x98\x06\x07", "field 99"),
    ],
)
async def test_fields_of_a_newer_build_are_refused(path: str, more: bytes, field: str) -> None:
    """Mutant: they are left out in silence, and the answer is of another request."""
    async with channel() as opened:
        code, named, details = await refused(opened, path, GOOD.SerializeToString() * (path != TRACE) + more)
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert "is not known to this build" in details
        for harmless in (b"\xf8\x3f\x07", b"\x72\x00"):  # field 1023, and a default that need not be written
            good = await opened.unary_unary(GENERATE)(GOOD.SerializeToString() + harmless)
            assert len(inference_pb2.GenerateResponse.FromString(good).choices[0].token_ids) == 3


async def test_bytes_that_are_no_message_within_a_stream() -> None:
    async with channel() as opened:
        good = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        call = opened.stream_stream(REFLECTION)(iter([good, b"\xff"]))
        assert b"paceline.v1.Inference" in await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def resumed(generation_id: str) -> bytes:
    """Without a request of its own."""
    asked = inference_pb2.GenerateRequest(generation_id=generation_id, resume=inference_pb2.Resume())
    return asked.SerializeToString()


async def test_health_is_listed() -> None:
    async with channel() as opened:
        answer = health_pb2.HealthListResponse.FromString(await opened.unary_unary("/grpc.health.v1.Health/List")(b""))
        serving = health_pb2.HealthCheckResponse.SERVING
        assert {name: one.status for name, one in answer.statuses.items()} == {"": serving, SERVICE: serving}


MANY = {
    "messages": generate(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * (MAX_MESSAGES + 1))),
    "stop": sampling(stop=["x"] * (MAX_STOP_STRINGS + 1)),
    "stop_token_ids": sampling(
        stop_token_ids=[i % VOCAB for i in range(5)] + list(range(2000, 2001 + MAX_STOP_TOKEN_IDS))
    ),
    "logit_bias": sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
    "resume.choices": generate(resume=inference_pb2.Resume(choices=[inference_pb2.Received()] * (MAX_N + 1))),
}


@pytest.mark.parametrize("field", MANY)
async def test_lists_that_are_too_long_are_told_by_their_length(field: str) -> None:
    """Each item costs time of the event loop: millions of them stopped the router for seconds, up to 36."""
    async with channel() as opened:
        code, named, details = await refused(opened, STREAM, MANY[field])
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert "at most" in details


ODD = {
    "repetition_penalty": sampling(repetition_penalty=1e-300),  # made every logit infinite: INTERNAL, nodes blamed
    "stop_token_ids": sampling(min_tokens=2, stop_token_ids=list(range(VOCAB))),  # left no token to choose
    "generation_id": resumed("short"),
}


@pytest.mark.parametrize("field", ODD)
async def test_values_that_nodes_could_not_serve(field: str) -> None:
    async with channel() as opened:
        code, named, _ = await refused(opened, STREAM, ODD[field])
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)


LONG = "é" * 100_000
LONG_NAMES = {
    "model": (GENERATE, generate(model=LONG)),
    "speculation.drafter": (GENERATE, generate(speculation=common_pb2.Speculation(drafter=LONG))),
    "speculation.tree": (GENERATE, generate(speculation=common_pb2.Speculation(tree=LONG))),
    "tenant": (GENERATE, generate(tenant=LONG)),
    "request_id": (TRACE, trace_pb2.TraceRequest(request_id=LONG).SerializeToString()),
    "generation_id": (STREAM, resumed(LONG)),
}


@pytest.mark.parametrize("field", LONG_NAMES)
async def test_long_names_are_not_repeated_in_full(field: str) -> None:
    """gRPC drops a call whose details are longer than its metadata may be: the client saw RESOURCE_EXHAUSTED."""
    path, data = LONG_NAMES[field]
    async with channel() as opened:
        code, named, details = await refused(opened, path, data)
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert len(details) < 500
