"""A peer that is stopped closes no connection: calls to it must end all the same, and soon."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from paceline.rpc.calls import CHANNEL_OPTIONS
from paceline.v1 import node_pb2, node_pb2_grpc

SERVER = """
import asyncio
from paceline.rpc.calls import start_server
from paceline.v1 import node_pb2, node_pb2_grpc

class Silent(node_pb2_grpc.DecodeNodeServicer):
    async def Decode(self, request, context):
        await context.write(node_pb2.DecodeEvent())
        try:
            await asyncio.sleep(60)
        finally:
            print("left", flush=True)

async def main():
    register = lambda server: node_pb2_grpc.add_DecodeNodeServicer_to_server(Silent(), server)
    server, address = await start_server(register, "127.0.0.1", 8)
    print(address, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
NOTICED_S = 8.0  # 1 s between pings, 1 s for the answer, and a slow machine; without pings calls take their 25 s


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_a_stopped_server_ends_old_calls_and_new_ones_within_seconds(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel, asyncio.timeout(30):
        stub = node_pb2_grpc.DecodeNodeStub(channel)
        call = stub.Decode(node_pb2.DecodeRequest(), timeout=25)
        await call.read()
        read = asyncio.create_task(call.read())
        await asyncio.wait({read}, timeout=2.5)
        assert not read.done(), "a stream that says nothing for some pings was ended"
        server.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await read
        assert time.monotonic() - stopped_at < NOTICED_S
        # The call may hear of it a moment before the channel does. TimeoutError when it does not.
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 5.0)
        assert channel.get_state() is not grpc.ChannelConnectivity.READY
        asked_at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await stub.Decode(node_pb2.DecodeRequest(), timeout=25).read()
        assert time.monotonic() - asked_at < NOTICED_S
        server.send_signal(signal.SIGCONT)
        await stub.Decode(node_pb2.DecodeRequest(), timeout=25, wait_for_ready=True).read()


async def test_a_stopped_client_is_left_within_seconds(server: subprocess.Popen[str]) -> None:
    """What a node holds for a router that is stopped or cut off comes back."""
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    client = f"""
import grpc
from paceline.v1 import node_pb2, node_pb2_grpc
call = node_pb2_grpc.DecodeNodeStub(grpc.insecure_channel({address!r})).Decode(node_pb2.DecodeRequest())
next(call)
print("begun", flush=True)
next(call)
"""
    with subprocess.Popen([sys.executable, "-c", client], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        assert await asyncio.to_thread(server.stdout.readline) == "left\n"
        assert time.monotonic() - stopped_at < NOTICED_S
        process.kill()
