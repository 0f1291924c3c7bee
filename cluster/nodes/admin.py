"""What operators may change while a deployment runs: gRPC on an address of its own, off unless asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import grpc.aio

from cluster.nodes.changes import NodeChanges
from cluster.nodes.listing import NodeView, node_of
from cluster.nodes.slots import Slot
from paceline.errors import ConfigError, DeadlineExceeded, NodeUnavailable, Overloaded, PacelineError
from paceline.rpc.audit import Audit, peer_of
from paceline.rpc.calls import answering_errors, make_server
from paceline.rpc.guard import Guard
from paceline.rpc.handshakes import Handshakes
from paceline.rpc.identity import Identity
from paceline.rpc.tls import Role
from paceline.v1 import admin_pb2, admin_pb2_grpc

MAX_REQUEST_BYTES = 64 * 1024
MAX_RPCS = 8
MAX_CONNECTIONS = 64
FOLLOW_POLL_S = 0.25
FOLLOW_S = 1800.0  # longest that a change is followed; it goes on
MAX_GRACE_S = 86_400.0
SERVES, RESTS, LEFT = ("ready", "kept"), ("drained", "gone"), ("gone",)
FOREIGN = "{} serves another model, weights or kernels than this deployment: no request reaches it"
FAILING = "{} did not start {} times in a row, and is tried again and again"
_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
METHODS = tuple(f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods)

Context = grpc.aio.ServicerContext[Any, Any]
Answers = AsyncIterator[admin_pb2.NodeProgress]


class AdminService(admin_pb2_grpc.AdminServicer):
    """The gRPC service for operators. Each RPC is: from proto, call, to proto."""

    def __init__(self, changes: NodeChanges, view: NodeView, drain_timeout_s: float) -> None:
        """drain_timeout_s: what streams get where the caller does not say."""
        self._changes, self._view, self._drain_timeout_s = changes, view, drain_timeout_s
        self._audit = Audit()
        self._making: set[asyncio.Task[Slot]] = set()

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: Context) -> admin_pb2.SetRoleResponse:
        async with answering_errors(context):
            switching = self._changes.switch(request.node_id, request.role, self._drain_timeout_s)
            slot = await self._audited(context, f"role {request.node_id} {request.role}", switching)
            return admin_pb2.SetRoleResponse(
                node_id=slot.node_id, role=slot.role, generation=slot.generation, address=slot.address
            )
        raise AssertionError("unreachable: the context was aborted")

    async def ListNodes(self, request: admin_pb2.ListNodesRequest, context: Context) -> admin_pb2.ListNodesResponse:
        supervisor = self._changes.supervisor
        nodes = [node_of(slot, self._view) for slot in supervisor.slots]
        for node in nodes:
            node.detail = supervisor.trouble or node.detail
        return admin_pb2.ListNodesResponse(nodes=nodes)

    async def AddNode(self, request: admin_pb2.AddNodeRequest, context: Context) -> Answers:
        adding = self._changes.add(request.role, request.host)
        act, most = f"add {request.role} {request.host}", request.most_failures
        async for told in self._follow(context, act, adding, SERVES, most):
            yield told

    async def DrainNode(self, request: admin_pb2.DrainNodeRequest, context: Context) -> Answers:
        draining = self._changes.drain(request.node_id, self._grace_s(request))
        async for told in self._follow(context, f"drain {request.node_id}", draining, RESTS):
            yield told

    async def StartNode(self, request: admin_pb2.StartNodeRequest, context: Context) -> Answers:
        starting = self._changes.start(request.node_id)
        act, most = f"start {request.node_id}", request.most_failures
        async for told in self._follow(context, act, starting, SERVES, most):
            yield told

    async def RemoveNode(self, request: admin_pb2.RemoveNodeRequest, context: Context) -> Answers:
        removing = self._changes.remove(request.node_id, self._grace_s(request))
        async for told in self._follow(context, f"remove {request.node_id}", removing, LEFT):
            yield told

    def _grace_s(self, request: admin_pb2.DrainNodeRequest | admin_pb2.RemoveNodeRequest) -> float:
        return min(max(0.0, request.grace_s), MAX_GRACE_S) if request.HasField("grace_s") else self._drain_timeout_s

    async def _audited(self, context: Context, act: str, change: Coroutine[Any, Any, Slot]) -> Slot:
        """Make a change as a whole, though its caller may leave meanwhile: half of one is worse than either."""
        if len(self._making) >= MAX_RPCS:
            change.close()
            raise Overloaded("other changes are being made")
        making = asyncio.create_task(self._make(peer_of(context), act, change))
        self._making.add(making)
        making.add_done_callback(self._made)
        return await asyncio.shield(making)

    async def _make(self, peer: str, act: str, change: Coroutine[Any, Any, Slot]) -> Slot:
        try:
            slot = await change
        except Exception as error:
            told = f"refused: {error}" if isinstance(error, PacelineError) else f"failed: {error!r}"
            self._audit.done(peer, "", f"nodes {act}", told)
            raise
        self._audit.done(peer, "", f"nodes {act}", f"{slot.node_id} is to {slot.wish}")
        return slot

    def _made(self, making: asyncio.Task[Slot]) -> None:
        self._making.discard(making)
        if not making.cancelled():
            making.exception()  # the audit has it, and the caller, where there still is one

    async def _follow(
        self, context: Context, act: str, change: Coroutine[Any, Any, Slot], ends: Sequence[str], most_failures: int = 0
    ) -> AsyncIterator[admin_pb2.NodeProgress]:
        """Make a change, then tell the node's state whenever that changes, until it is one of ``ends``. most_failures:
        starts in a row that may fail meanwhile; 0: any number."""
        async with answering_errors(context):
            slot, last = await self._audited(context, act, change), None
            supervisor, end = self._changes.supervisor, time.monotonic() + FOLLOW_S
            while True:
                node = node_of(slot, self._view)
                over = node.state in ends and (node.state != "gone" or slot not in supervisor.slots)
                if over or node != last:
                    yield admin_pb2.NodeProgress(node=node, done=over)
                if over:
                    return
                if node.state == "foreign":
                    raise NodeUnavailable(FOREIGN.format(slot.node_id))
                if 0 < most_failures <= slot.failures:
                    raise NodeUnavailable(FAILING.format(slot.node_id, slot.failures))
                if supervisor.superseded:
                    raise NodeUnavailable("another process supervises this deployment now, and goes on with this")
                if time.monotonic() >= end:
                    raise DeadlineExceeded(f"{slot.node_id} is {node.state} after {FOLLOW_S:g} s; it goes on")
                last = node
                await asyncio.sleep(FOLLOW_POLL_S)


class AdminServer:
    """Serving until ``stop``."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server, self.port = server, port

    async def stop(self) -> None:
        """End at once; a change under way is the supervisor's to end."""
        await self._server.stop(0)


async def serve_admin(
    service: admin_pb2_grpc.AdminServicer,
    address: str,
    identity: Identity,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    on_refused: Callable[[], None] = lambda: None,
    on_failed: Callable[[str], None] = lambda _: None,
) -> AdminServer:
    """Serve at ``host:port``; port 0 takes a free one. identity: the router's; with TLS, callers need an ``admin``
    certificate. interceptors: what asks who calls, after that. on_refused: called for each caller whose certificate is
    not good enough. on_failed: see `Handshakes`. Raises ConfigError when the address cannot be had."""
    options = [("grpc.max_receive_message_length", MAX_REQUEST_BYTES), ("grpc.so_reuseport", 0)]
    roles: dict[str, Role] = {method.name: "admin" for method in _SERVICE.methods}
    guard = Guard(roles, "", by_role=identity.tls is not None, on_refused=on_refused)  # operators have no token
    handshakes = Handshakes(on_failed)
    server = make_server(options, MAX_RPCS, [guard, *interceptors], handshakes=handshakes, connections=MAX_CONNECTIONS)
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    try:
        port = identity.bind(server, address, handshakes.began)
    except RuntimeError as error:
        raise ConfigError("admin", f"cannot listen at {address} (port 0 takes a free one): {error}") from None
    await server.start()
    return AdminServer(server, port)
