"""The public gRPC service: paceline.v1.Inference with health and reflection."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.access.access import Access, Need
from cluster.contract import public_wire
from cluster.contract.plan import Plan
from cluster.frontdoor.gate import Gate, Kind, Rules
from cluster.frontdoor.held_bodies import HeldBodies
from cluster.routing.resume import UnknownGeneration
from cluster.routing.router import Router
from paceline import answer_wire
from paceline.errors import ConfigError, DeadlineExceeded, InvalidRequest
from paceline.rpc.calls import MAX_MESSAGE_BYTES, answering_errors, end_server, make_server
from paceline.rpc.connections import PUBLIC_SERVERS, most_connections
from paceline.rpc.handshakes import Handshakes
from paceline.rpc.tls import TlsFolder
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2
from paceline.wire import trace_to_proto

MIN_PING_INTERVAL_MS = 250  # clients of several routers ask twice a second whether this one is there
MAX_PING_STRIKES = 100  # too early ones in a row: those of a second arrive together at a router that was stopped
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTHY = ("", SERVICE)  # what health is told of; empty: of the server
MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_FIELDS = 65_536  # of a request above 64 KiB: more keep the event loop busy while they are parsed
WRITE_TIMEOUT_S = 60.0  # for one chunk: a client that reads nothing for longer loses its request
GENERATION_ID_BYTES = 16
EXTRA_RPCS = 256  # beyond the requests that the router admits: refusals, tokenizing, traces
MAX_CHECKS = 256  # of health at once
MAX_WATCHES, MAX_WATCHES_OF_PEER = 1024, 64  # of health
MAX_REFLECTIONS, MAX_REFLECTIONS_OF_PEER = 64, 8  # streams that read the schema

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The public gRPC service of a router. Each RPC is: from proto, call, to proto."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        async with answering_errors(context):
            if request.HasField("resume"):
                raise InvalidRequest("resume", "only a stream is resumed: use GenerateStream")
            asked = replace(public_wire.generation_request(request), generation_id="")  # nothing to go on with
            return answer_wire.generate_response(await self._router.complete(asked))
        raise AssertionError("unreachable: the context was aborted")

    async def GenerateStream(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        plans: list[Plan] = []
        async with answering_errors(context), _answering_unknown(context):
            asked = public_wire.generation_request(request)
            if not asked.generation_id:
                asked = replace(asked, generation_id=secrets.token_hex(GENERATION_ID_BYTES))
            async with aclosing(self._router.generate(asked, plans.append)) as chunks:
                async for chunk in chunks:
                    message = answer_wire.generate_chunk(chunk)
                    if plans:
                        message.resumable.CopyFrom(public_wire.resumable(asked.generation_id, plans.pop().admitted))
                    await _write(context, message)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with answering_errors(context):
            return answer_wire.tokenize_response(await self._router.tokenize(public_wire.tokenize_prompt(request)))
        raise AssertionError("unreachable: the context was aborted")

    async def ModelInfo(
        self, request: inference_pb2.ModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfoResponse:
        return answer_wire.model_info_response(self._router.model_info())

    async def Trace(self, request: trace_pb2.TraceRequest, context: Context) -> trace_pb2.TraceResponse:
        async with answering_errors(context):
            return await asyncio.to_thread(trace_to_proto, await self._router.trace(request.request_id))
        raise AssertionError("unreachable: the context was aborted")


class _Health(health.aio.HealthServicer):  # type: ignore[misc, unused-ignore]
    """gRPC's own leaves ``List`` out, and writes a traceback for whoever calls it."""

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        asked = {name: health_pb2.HealthCheckRequest(service=name) for name in HEALTHY}
        statuses = {name: await self.Check(check, context) for name, check in asked.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


@asynccontextmanager
async def _answering_unknown(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except UnknownGeneration as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))


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
        await end_server(self.server, lambda: self.router.inflight, grace_s)


def rules(max_work: int) -> Rules:
    """What every RPC of the server needs, and how many there may be at once. max_work: those of the router."""
    work = Kind(Need.INFER, max_work, max_work)
    asks = Kind(Need.KEY, max_work, max_work)
    checks = Kind(Need.OPEN, MAX_CHECKS, MAX_CHECKS)
    watches = Kind(Need.OPEN, MAX_WATCHES, MAX_WATCHES_OF_PEER)
    schema = Kind(Need.OPERATOR, MAX_REFLECTIONS, MAX_REFLECTIONS_OF_PEER)
    kinds = {f"/{SERVICE}/{name}": work for name in ("Generate", "GenerateStream", "Tokenize")}
    kinds |= {f"/{SERVICE}/{name}": asks for name in ("ModelInfo", "Trace")}  # the router says whose a trace is
    kinds |= {f"/{health.SERVICE_NAME}/{name}": checks for name in ("Check", "List")}
    kinds |= {f"/{health.SERVICE_NAME}/Watch": watches}
    return Rules(kinds | {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": schema})


def operators_gate(methods: Sequence[str], access: Access | None) -> Gate:
    """Lets operators' keys in alone, or everybody where there are no keys."""
    kind = Kind(Need.OPERATOR, EXTRA_RPCS, EXTRA_RPCS)
    return Gate(Rules(dict.fromkeys(methods, kind)), access, HeldBodies())


async def serve_grpc(
    router: Router,
    address: str,
    access: Access | None = None,
    *,
    tls: TlsFolder | None = None,
    on_failed: Callable[[str], None] = lambda _: None,
    bodies: HeldBodies | None = None,
) -> GrpcServer:
    """Serve at ``host:port``; port 0 takes a free one. access: who may call; None: everybody. tls: has the public
    certificate; None: in the clear. on_failed: see `Handshakes`. bodies: has room for messages; None: its own. Raises
    ConfigError when the address cannot be had."""
    options = [
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.so_reuseport", 0),
    ]
    max_work = router.config.max_inflight + router.config.max_queued + EXTRA_RPCS
    gate = Gate(rules(max_work), access, bodies or HeldBodies())
    handshakes = Handshakes(on_failed)
    most = most_connections(PUBLIC_SERVERS)
    server = make_server(options, None, [gate], MAX_FIELDS, handshakes=handshakes, connections=most)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(router), server)
    checks = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in HEALTHY:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.public_credentials(handshakes.began))
    except RuntimeError as error:
        raise ConfigError("grpc", f"cannot listen at {address} (port 0 takes a free one): {error}") from None
    await server.start()
    return GrpcServer(server, port, router, checks)
