"""The public gRPC service: paceline.v1.Inference with health and reflection."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster import messages
from cluster.router import Router
from paceline.engine.rpc import MAX_MESSAGE_BYTES, answering_errors
from paceline.errors import ConfigError, DeadlineExceeded
from paceline.v1 import inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_REQUEST_BYTES = 4 * 1024 * 1024
WRITE_TIMEOUT_S = 60.0  # for one chunk: a client that reads nothing for longer loses its request
STOP_GRACE_S = 0.2  # for what is not a request, such as an open health watch
EXTRA_RPCS = 256  # beyond the requests that the router admits: refusals, tokenizing, health

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """From proto, call, to proto."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with answering_errors(context):
            return messages.generate_response(await self._router.complete(messages.generation_request(request)))
        raise AssertionError("unreachable: the context was aborted")

    async def GenerateStream(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with (
            answering_errors(context),
            aclosing(self._router.generate(messages.generation_request(request))) as chunks,
        ):
            async for chunk in chunks:
                await _write(context, messages.generate_chunk(chunk))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with answering_errors(context):
            return messages.tokenize_response(await self._router.tokenize(messages.tokenize_prompt(request)))
        raise AssertionError("unreachable: the context was aborted")

    async def ModelInfo(
        self, request: inference_pb2.ModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfoResponse:
        return messages.model_info_response(self._router.model_info())


async def _write(context: Context, chunk: inference_pb2.GenerateChunk) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(chunk)
    except TimeoutError:
        raise DeadlineExceeded(f"the client read nothing for {WRITE_TIMEOUT_S:g} s") from None


@dataclass(frozen=True)
class GrpcServer:
    """A server that runs."""

    server: grpc.aio.Server
    port: int
    router: Router
    health: health.aio.HealthServicer

    async def stop(self, grace_s: float) -> None:
        """Say so to health watchers, let requests finish for ``grace_s`` seconds, then end."""
        await self.health.enter_graceful_shutdown()
        end = time.monotonic() + grace_s
        # Not stop(grace_s): a client's open health watch would make it take the whole grace.
        while self.router.inflight and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self.server.stop(min(grace_s, STOP_GRACE_S))


async def serve_grpc(router: Router, address: str) -> GrpcServer:
    """Serve at ``host:port``; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=router.config.max_inflight + EXTRA_RPCS,
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(router), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError("grpc", f"cannot listen at {address}: {error}") from None
    await server.start()
    return GrpcServer(server, port, router, checks)
