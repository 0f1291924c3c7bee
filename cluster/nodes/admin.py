"""What operators may change while a deployment runs: gRPC on an address of its own, off unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from cluster.nodes.supervise import Supervisor
from paceline.errors import ConfigError
from paceline.rpc.calls import answering_errors, make_server
from paceline.rpc.guard import Guard
from paceline.rpc.identity import Identity
from paceline.v1 import admin_pb2, admin_pb2_grpc

MAX_REQUEST_BYTES = 64 * 1024
MAX_RPCS = 8
_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
METHODS = tuple(f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods)


class AdminService(admin_pb2_grpc.AdminServicer):
    """The gRPC service for operators. Each RPC is: from proto, call, to proto."""

    def __init__(self, supervisor: Supervisor, drain_timeout_s: float) -> None:
        self._supervisor, self._drain_timeout_s = supervisor, drain_timeout_s

    async def SetRole(
        self, request: admin_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.SetRoleResponse:
        async with answering_errors(context):
            slot = await self._supervisor.switch(request.node_id, request.role, self._drain_timeout_s)
            return admin_pb2.SetRoleResponse(
                node_id=slot.node_id, role=slot.role, generation=slot.generation, address=slot.address
            )
        raise AssertionError("unreachable: the context was aborted")


class AdminServer:
    """Serving until ``stop``."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server, self.port = server, port

    async def stop(self) -> None:
        """End at once; a switch under way is the supervisor's to end."""
        await self._server.stop(0)


async def serve_admin(
    supervisor: Supervisor,
    address: str,
    drain_timeout_s: float,
    identity: Identity,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    on_refused: Callable[[], None] = lambda: None,
) -> AdminServer:
    """Serve at ``host:port``; port 0 takes a free one. identity: the router's; with TLS, callers need an ``admin``
    certificate. interceptors: what asks who calls, after that. on_refused: called for each caller whose certificate is
    not good enough. Raises ConfigError when the address cannot be had."""
    options = [("grpc.max_receive_message_length", MAX_REQUEST_BYTES), ("grpc.so_reuseport", 0)]
    guard = Guard({"SetRole": "admin"}, "", by_role=identity.tls is not None, on_refused=on_refused)  # no token
    server = make_server(options, MAX_RPCS, [guard, *interceptors])
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(supervisor, drain_timeout_s), server)
    try:
        port = identity.bind(server, address)
    except RuntimeError as error:
        raise ConfigError("admin", f"cannot listen at {address} (port 0 takes a free one): {error}") from None
    await server.start()
    return AdminServer(server, port)
