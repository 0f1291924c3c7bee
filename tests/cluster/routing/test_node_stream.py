"""A stream that is closed while somebody reads it."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from cluster.routing.node_calls import NodeCalls, NodeFailure, NodeStream
from cluster.state.registry_types import NodeRecord
from paceline.v1 import node_pb2


class LateFailure:
    """A call whose read fails only after the call was cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    async def read(self) -> node_pb2.DecodeEvent:
        await self.cancelled.wait()
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "connection lost")


async def test_a_read_that_fails_after_the_end_is_the_failure_of_its_node() -> None:
    calls, node = NodeCalls(), NodeRecord("decode-0", "decode", 1, "127.0.0.1:1")
    stream: NodeStream[node_pb2.DecodeEvent] = calls._started(LateFailure(), node, calls._line(node))
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(NodeFailure, match=r"decode-0.*connection lost"):
        await reading
    assert not calls.own
    await calls.close()
