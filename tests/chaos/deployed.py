"""Deployments under faults: their options, their nodes as processes, and whether all is well with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import torch

from paceline.client import AsyncClient, Client, PacelineError
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.chaos.faults import Node
from tests.chaos.sockets import who_listens
from tests.multihost.small_model import SPEC, write_model
from tests.support.node_secret import NODE_METADATA
from tests.support.untrained_heads import write_tiny_head

LAYOUTS: dict[str, dict[str, Any]] = {
    "spare": {"nodes": 2, "drafter": "eagle3", "handoff": "draft_kv", "gap_s": (2.5, 6.0)},
    "no spare": {"nodes": 1, "drafter": "mtp", "handoff": "hidden_states", "gap_s": (6.0, 12.0)},
}
WHOLE_TIMEOUT_S = 45.0  # until all nodes are there again, all pages back


def write_models(folder: Path) -> Path:
    """A small model and untrained EAGLE-3 heads beside it."""
    torch.set_num_threads(1)
    write_tiny_head(folder / "eagle3", "eagle3", SPEC)
    return write_model(folder / "model")


def options_of(layout: str, model: Path) -> list[str]:
    chosen = LAYOUTS[layout]
    options = {
        "model": model,
        "prefill-nodes": chosen["nodes"],
        "decode-nodes": chosen["nodes"],
        "drafter": chosen["drafter"],
        "drafters": "ngram",
        "handoff": chosen["handoff"],
        "threads-per-node": 1,
        "kv-cache-tokens": 65536,
        "trace-requests": 2048,
    }
    if chosen["drafter"] == "eagle3":
        options["drafter-path"] = model.parent / "eagle3"
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def view(processes: Callable[[], Iterable[psutil.Process]], routers: Sequence[str], pids: dict[str, int]) -> list[Node]:
    """The nodes that the routers at these addresses have, with their processes; none while no router answers.
    processes: among which they are. pids: by address, those known."""
    try:
        with Client(routers) as client:
            nodes = client.model_info(timeout=10.0).nodes
    except PacelineError:
        return []
    found = []
    for node in nodes:
        if node.address not in pids:
            port = int(node.address.rpartition(":")[2])
            pid = who_listens((process.pid for process in processes()), port)
            if pid is None:
                continue
            pids[node.address] = pid
        found.append(Node(node.id, node.role, pids[node.address], node.address))
    return found


async def whole(client: AsyncClient, nodes: list[str]) -> None:
    """Until every node is there, holds nothing and has all its pages."""
    state: Any = None
    try:
        async with asyncio.timeout(WHOLE_TIMEOUT_S):
            while True:
                info = await client.model_info()
                state = [await status_of(node.address, node.role) for node in info.nodes]
                ids = [node.id for node in info.nodes]
                if ids == nodes and all(one is not None and is_free(one) for one in state):
                    break
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"not whole within {WHOLE_TIMEOUT_S:g} s: {state}") from None
    assert [one.integrity for one in state] == [""] * len(nodes)


def is_free(status: node_pb2.StatusResponse) -> bool:
    node = status.node
    free: bool = node.free_pages == node.total_pages
    return free and status.held == node.running == node.waiting == 0


async def works(node: Node) -> bool:
    """Whether a node has requests."""
    status = await status_of(node.address, node.role)
    return status is not None and status.held + status.node.running + status.node.waiting > 0


async def status_of(address: str, role: str) -> node_pb2.StatusResponse | None:
    async with grpc.aio.insecure_channel(address) as channel:
        make: Any = node_pb2_grpc.DecodeNodeStub if role == "decode" else node_pb2_grpc.PrefillNodeStub
        try:
            answer: node_pb2.StatusResponse = await make(channel).Status(
                node_pb2.StatusRequest(), timeout=2.0, metadata=NODE_METADATA
            )
        except grpc.aio.AioRpcError:
            return None
    return answer
