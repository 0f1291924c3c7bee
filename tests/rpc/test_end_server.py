"""A server that ends: calls in progress have their grace, and one that is over has its status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.empty_pb2 import Empty

from paceline.rpc.calls import end_server, start_server

METHOD = "/test.Node/Answer"


class Node:
    """One RPC, counted as those of the nodes are: in the generator's ``finally``, before its status is sent."""

    def __init__(self, answers: int, step_s: float, status_delay_s: float) -> None:
        self.active = 0
        self.answers, self.step_s, self.status_delay_s = answers, step_s, status_delay_s

    async def answer(self, request: Empty, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.active += 1
        try:
            for i in range(self.answers):
                await context.write(bytes([i]))
                await asyncio.sleep(self.step_s)
        finally:
            self.active -= 1
        await asyncio.sleep(self.status_delay_s)

    def register(self, server: grpc.aio.Server) -> None:
        handler: grpc.RpcMethodHandler[Empty, bytes] = grpc.unary_stream_rpc_method_handler(
            self.answer,
            Empty.FromString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Node", {"Answer": handler})])


@asynccontextmanager
async def asking(node: Node) -> AsyncIterator[tuple[grpc.aio.Server, Any]]:
    """The node's server, and a call that has its first answer."""
    server, address = await start_server(node.register, "127.0.0.1", 8)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
            call = ask(b"")
            assert await call.read() == b"\0"
            yield server, call
    finally:
        await server.stop(0)


async def rest(call: Any) -> tuple[int, grpc.StatusCode]:
    """How many further answers come, and the status."""
    count = 0
    try:
        while await call.read() is not grpc.aio.EOF:
            count += 1
    except grpc.aio.AioRpcError:
        pass
    return count, await call.code()


async def test_a_call_in_progress_ends_well_and_its_status_is_sent() -> None:
    """The count falls 0.1 s before the status leaves: stopping at once would turn a whole answer into UNAVAILABLE."""
    node = Node(answers=5, step_s=0.05, status_delay_s=0.1)
    async with asking(node) as (server, call):
        reading = asyncio.create_task(rest(call))
        await end_server(server, lambda: node.active, 20.0)
        assert await reading == (4, grpc.StatusCode.OK)


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_a_call_that_outlasts_the_grace_is_cut_off(grace_s: float) -> None:
    node = Node(answers=200, step_s=1.0, status_delay_s=0.0)
    async with asking(node) as (server, call):
        reading = asyncio.create_task(rest(call))
        began = time.monotonic()
        await end_server(server, lambda: node.active, grace_s)
        assert grace_s <= time.monotonic() - began < 60.0  # of 200 seconds
        assert (await reading)[1] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_stream_that_stays_open_by_design_does_not_take_the_grace() -> None:
    node = Node(answers=200, step_s=1.0, status_delay_s=0.0)
    async with asking(node) as (server, call):
        reading = asyncio.create_task(rest(call))
        await asyncio.wait_for(end_server(server, lambda: 0, 100.0), 30.0)
        assert (await reading)[1] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
