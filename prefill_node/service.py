"""The prefill node over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from paceline.node.shell import NodeShell
from paceline.rpc.calls import answer_stream, answering_errors
from paceline.rpc.tls import Role
from paceline.v1 import node_pb2, node_pb2_grpc, trace_pb2

Context = grpc.aio.ServicerContext[Any, Any]
CALLERS: Mapping[str, Role] = {"Prefill": "router", "Connect": "router", "Status": "router", "Trace": "router"}


class PrefillCalls(Protocol):
    """What a prefill node does for callers; ``prefill_node.node.PrefillNode``."""

    def prefill(self, request: node_pb2.PrefillRequest) -> AsyncGenerator[node_pb2.PrefillEvent, None]:
        """Compute a prompt: its first token as soon as it is sampled, then the end of the hand-off."""

    async def connect(self, decode_address: str) -> node_pb2.ConnectResponse:
        """Pair with a decode node ahead of the first request."""


class PrefillService(node_pb2_grpc.PrefillNodeServicer):
    """The gRPC service of a prefill node. Each RPC is: from proto, call, to proto."""

    def __init__(self, node: PrefillCalls, shell: NodeShell) -> None:
        self._node = node
        self._shell = shell

    async def Prefill(self, request: node_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        await answer_stream(self._node.prefill(request), context)

    async def Connect(self, request: node_pb2.ConnectRequest, context: Context) -> node_pb2.ConnectResponse:
        async with answering_errors(context):
            return await self._node.connect(request.decode_address)
        raise AssertionError("unreachable: the context was aborted")

    async def Status(self, request: node_pb2.StatusRequest, context: Context) -> node_pb2.StatusResponse:
        return self._shell.status()

    async def Trace(self, request: trace_pb2.TraceRequest, context: Context) -> trace_pb2.TraceResponse:
        return await self._shell.trace(request)
