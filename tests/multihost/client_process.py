"""A client on some host. Prints one JSON object a line; "at" is the monotonic clock, which all hosts share.

``client_process.py HOST:PORT REQUESTS.json``: streams all requests (generation options with their "prompt"): for each
chunk {"stream", "at", "first_index", "token_ids"}, at a stream's end {"stream", "end": {...}}.
``client_process.py HOST:PORT``: until killed, {"at", "nodes": {id: address}, "running": {id: streams}} at each change.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from paceline.client import AsyncClient

TIMEOUT_S = 120.0
POLL_S = 0.05


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


async def watch(client: AsyncClient) -> None:
    seen = None
    while True:
        nodes = (await client.model_info()).nodes
        now = {"nodes": {node.id: node.address for node in nodes}, "running": {node.id: node.running for node in nodes}}
        if now != seen:
            tell(at=time.monotonic(), **now)
        seen = now
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
