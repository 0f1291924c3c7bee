"""A client on some host. Prints one JSON object a line; "at" is the monotonic clock, which all hosts share.

``client_process.py HOST:PORT REQUESTS.json``: streams all requests (generation options with their "prompt"): for each
chunk {"stream", "at", "first_index", "token_ids"}, at a stream's end {"stream", "end": {...}}.
``client_process.py HOST:PORT``: until killed, again and again {"at", "nodes": {id: address}, "running": {id: streams}}:
the nodes as the router has them, and the streams that each decode node counted itself after "at", if it answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio

from paceline.client import AsyncClient
from paceline.rpc.identity import Identity, Secret
from paceline.v1 import node_pb2, node_pb2_grpc

TIMEOUT_S = 120.0
SECRET = "the secret of a deployment whose nodes are watched"
NODE_METADATA = Identity("router", Secret(SECRET).call_token).metadata
POLL_S = 0.05
STATUS_TIMEOUT_S = 0.2  # a node behind a cut cable must not hold up what is seen of the others


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def stream(client: AsyncClient, number: int, request: dict[str, Any]) -> None:
    prompt = request.pop("prompt")
    async for chunk in client.stream(prompt, **request):
        if chunk.token_ids:
            tell(stream=number, at=time.monotonic(), first_index=chunk.first_index, token_ids=chunk.token_ids)
        if (done := chunk.completion) is not None:
            end = {"prefill": done.nodes.prefill, "decode": done.nodes.decode, "target_kv": done.handoff.target_kv}
            tell(stream=number, end=end)


async def running_on(address: str) -> int | None:
    """The streams of a decode node, which its heartbeat tells up to a second late; None when it does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            status = await stub.Status(node_pb2.StatusRequest(), timeout=STATUS_TIMEOUT_S, metadata=NODE_METADATA)
        except grpc.aio.AioRpcError:
            return None
    return int(status.node.running)


async def watch(client: AsyncClient) -> None:
    while True:
        nodes = (await client.model_info()).nodes
        at = time.monotonic()
        decodes = [node for node in nodes if node.role == "decode"]
        counts = await asyncio.gather(*(running_on(node.address) for node in decodes))
        running = {node.id: count for node, count in zip(decodes, counts, strict=True) if count is not None}
        tell(at=at, nodes={node.id: node.address for node in nodes}, running=running)
        await asyncio.sleep(POLL_S)


async def main(address: str, file: str | None = None) -> None:
    async with AsyncClient(address, timeout=TIMEOUT_S) as client:
        if file is None:
            await watch(client)
            return
        requests = json.loads(Path(file).read_text())
        await asyncio.gather(*(stream(client, number, request) for number, request in enumerate(requests)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
