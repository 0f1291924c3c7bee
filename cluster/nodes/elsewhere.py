"""The operators' gRPC of a router that supervises nothing: it says where operators are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import grpc.aio
import redis

from cluster.state.holder import Holder
from paceline.errors import NodeUnavailable
from paceline.rpc.calls import answering_errors
from paceline.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ElsewhereService(admin_pb2_grpc.AdminServicer):
    """Refuses every call with UNAVAILABLE, and the address that the supervisor serves operators at."""

    def __init__(self, find: Callable[[], Holder | None]) -> None:
        """find: who supervises the deployment; blocks, and may raise redis.RedisError."""
        self._find = find

    async def SetRole(self, request: admin_pb2.SetRoleRequest, context: Context) -> NoReturn:
        await self._refuse(context)

    async def ListNodes(self, request: admin_pb2.ListNodesRequest, context: Context) -> NoReturn:
        await self._refuse(context)

    async def AddNode(self, request: admin_pb2.AddNodeRequest, context: Context) -> NoReturn:  # type: ignore[override]
        await self._refuse(context)

    async def DrainNode(self, request: admin_pb2.DrainNodeRequest, context: Context) -> NoReturn:  # type: ignore[override]
        await self._refuse(context)

    async def StartNode(self, request: admin_pb2.StartNodeRequest, context: Context) -> NoReturn:  # type: ignore[override]
        await self._refuse(context)

    async def RemoveNode(self, request: admin_pb2.RemoveNodeRequest, context: Context) -> NoReturn:  # type: ignore[override]
        await self._refuse(context)

    async def _refuse(self, context: Context) -> NoReturn:
        async with answering_errors(context):
            raise NodeUnavailable(f"this router supervises no nodes: {await self._where()}")
        raise AssertionError("unreachable: the context was aborted")

    async def _where(self) -> str:
        try:
            holder = await asyncio.to_thread(self._find)
        except redis.RedisError as error:
            return f"who does is not known while Redis is away: {error}"
        if holder is None:
            return "nobody does now; ask again in a few seconds"
        if not holder.admin:
            return f"{holder} does, and was started without --admin"
        return f"ask {holder.admin}, seen from host {holder.host} (process {holder.pid})"
