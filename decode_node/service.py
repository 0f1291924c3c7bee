"""The decode node over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from paceline.node.shell import NodeShell
from paceline.rpc.audit import peer_of
from paceline.rpc.calls import answer_stream, answering_errors
from paceline.rpc.tls import Role
from paceline.v1 import handoff_pb2, node_pb2, node_pb2_grpc, trace_pb2

Context = grpc.aio.ServicerContext[Any, Any]
CALLERS: Mapping[str, Role] = {
    "Decode": "router",
    "Pair": "prefill",
    "Handoff": "prefill",
    "Status": "router",
    "Trace": "router",
    "Recall": "router",
}


class DecodeCalls(Protocol):
    """What a decode node does for callers; ``decode_node.node.DecodeNode``."""

    def decode(self, request: node_pb2.DecodeRequest) -> AsyncGenerator[node_pb2.DecodeEvent, None]:
        """Reserve pages, then stream what each round commits."""

    def recall(self, request: node_pb2.RecallRequest) -> node_pb2.RecallResponse:
        """The tokens that were made of sequences."""

    async def pair(self, request: handoff_pb2.PairRequest) -> handoff_pb2.PairResponse:
        """Open a link for a prefill node. PairingRefused when the two do not fit."""

    def handoff(
        self, messages: AsyncIterable[handoff_pb2.HandoffMessage], address: str
    ) -> AsyncGenerator[handoff_pb2.HandoffAck, None]:
        """Serve the control stream of one link until either side ends it. address: of the other side, without its
        port."""


class DecodeService(node_pb2_grpc.DecodeNodeServicer):
    """The gRPC service of a decode node. Each RPC is: from proto, call, to proto."""

    def __init__(self, node: DecodeCalls, shell: NodeShell) -> None:
        self._node = node
        self._shell = shell

    async def Decode(self, request: node_pb2.DecodeRequest, context: Context) -> None:  # type: ignore[override]
        await answer_stream(self._node.decode(request), context)

    async def Pair(self, request: handoff_pb2.PairRequest, context: Context) -> handoff_pb2.PairResponse:
        async with answering_errors(context):
            return await self._node.pair(request)
        raise AssertionError("unreachable: the context was aborted")

    async def Handoff(  # type: ignore[override]
        self, request_iterator: AsyncIterator[handoff_pb2.HandoffMessage], context: Context
    ) -> None:
        await answer_stream(self._node.handoff(request_iterator, peer_of(context)), context)

    async def Status(self, request: node_pb2.StatusRequest, context: Context) -> node_pb2.StatusResponse:
        return self._shell.status()

    async def Trace(self, request: trace_pb2.TraceRequest, context: Context) -> trace_pb2.TraceResponse:
        return await self._shell.trace(request)

    async def Recall(self, request: node_pb2.RecallRequest, context: Context) -> node_pb2.RecallResponse:
        async with answering_errors(context):
            return self._node.recall(request)
        raise AssertionError("unreachable: the context was aborted")
