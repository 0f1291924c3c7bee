"""Thousands of mixed requests, a third of them abandoned at random moments: no token is wrong, nothing is kept.

The answers of the same requests, decoded plainly and alone before, are what every later answer is compared with:
tokens, text and finish reason; of an abandoned one, what was received must be its beginning. A short run is part of the
suite; ``--requests`` makes it a long one, in which the memory, open files and threads of every process must stay flat.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
import torch

from paceline.client import AsyncClient
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.multihost.small_model import write_model
from tests.soak.asks import make_asks
from tests.soak.calls import Calls
from tests.soak.load import Load
from tests.soak.processes import Slope, Watch, grown, table, trends
from tests.support.needs import needs_kernels
from tests.support.node_secret import NODE_METADATA
from tests.support.server import serve as serving
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec
from tests.support.untrained_heads import write_tiny_head

pytestmark = [needs_kernels, pytest.mark.e2e]

SHORT_REQUESTS, SHORT_SEED, SHORT_EACH = 150, 23020, 2
AT_ONCE = 16
TELL_EVERY_S = 10.0
FREE_TIMEOUT_S = 20.0
SPEC = replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=1024)
# Small on purpose: pages run short, the prefix cache is evicted all the time, requests wait on the router and on nodes.
OPTIONS = {
    "prefill-nodes": 1,
    "decode-nodes": 1,
    "drafter": "eagle3",
    "drafters": "ngram,suffix,trie",
    "threads-per-node": 1,
    "kv-cache-tokens": 3072,
    "prefill-chunk-tokens": 16,
    "max-running": 12,
    "max-inflight": 16,
    "lease-ttl-s": 15,  # a machine that other work keeps busy is no fault here
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a deployment with a small model and untrained EAGLE-3 heads."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("soak")
    write_tiny_head(folder / "eagle3", "eagle3", SPEC)
    given = OPTIONS | {"model": write_model(folder / "model", SPEC), "drafter-path": folder / "eagle3"}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


async def test_soak(options: list[str], request: pytest.FixtureRequest) -> None:
    """sglang #23020: quality fell after some 100 requests. Every text is compared, a third of the clients leave."""
    requests = request.config.getoption("requests", default=None)
    seed = request.config.getoption("seed", default=None)
    if seed is None:
        seed = int(time.time()) if requests else SHORT_SEED
    print(f"\nseed {seed}, {requests or SHORT_REQUESTS} requests, {AT_ONCE} at once")
    with serving(*options) as server:
        async with (
            AsyncClient(server.grpc) as client,
            httpx.AsyncClient(base_url=f"http://{server.http}", timeout=None) as http,
        ):
            calls, asks = Calls(client, http), make_asks(seed, each=3 if requests else SHORT_EACH)
            right = [await calls.plainly(ask) for ask in asks]
            assert all(one.complete for one in right)
            load = Load(calls, asks, right, seed, requests or SHORT_REQUESTS)
            watch = Watch(psutil.Process(server.process.pid), lambda: load.ended)
            began = time.monotonic()
            await run(load, watch)
            tell(load, time.monotonic() - began)
            roles = await roles_of(client, watch)
            found = slopes_of(watch, load, roles)
            errors = complaints({server.process.pid, *roles})
            await all_free(client)
            retries = await retried(http)
    check_answers(load)
    assert errors == []
    if requests:
        assert set(retries) <= {"Overloaded"}, retries
        assert grown(found, load.turns) == []
        assert {"prefill", "decode", "router", "client", "valkey-server"} <= {name.rpartition(" ")[0] for name in found}


async def run(load: Load, watch: Watch) -> None:
    """All of it, watched and told."""
    watching = [asyncio.create_task(watch.run()), asyncio.create_task(progress(load, watch))]
    try:
        await load.run(AT_ONCE)
        await asyncio.to_thread(watch.look)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def progress(load: Load, watch: Watch) -> None:
    """A line now and then."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        private = sum(samples[-1].private for samples in watch.samples.values())
        print(
            f"  {time.monotonic() - began:4.0f} s: {load.ended} of {load.turns} requests, {load.complete} complete, "
            f"{load.left.total()} left, {len(load.wrong)} wrong; {private:.0f} MiB in {len(watch.samples)} processes",
            flush=True,
        )


def tell(load: Load, seconds: float) -> None:
    """Print what happened."""
    print(f"{load.ended} requests, {load.tokens} tokens in {seconds:.0f} s: {load.complete} complete", end=", ")
    print(f"{load.left.total()} left early, {len(load.wrong)} wrong")
    for how, count in sorted(load.left.items()):
        print(f"  left: {how}: {count}")
    for wrong in load.wrong[:20]:
        print(f"  WRONG {wrong}")


def check_answers(load: Load) -> None:
    """Nothing lost, nothing wrong, every kind answered, a third left."""
    assert load.wrong == []
    assert load.ended == load.turns
    assert load.left.total() >= 0.28 * load.turns
    assert set(load.kinds) == {ask.kind for ask in load.asks}


def slopes_of(watch: Watch, load: Load, roles: Mapping[int, str]) -> dict[str, Mapping[str, Slope]]:
    """By name and number of the process, printed too; without those that were not there for the second half."""
    found: dict[str, Mapping[str, Slope]] = {}
    passing = []
    for pid, samples in watch.samples.items():
        name = f"{roles.get(pid, watch.names[pid])} {pid}"
        slopes = trends(samples, load.turns)
        if slopes is None:
            passing.append(f"{name} ({len(samples)} samples)")
        else:
            found[name] = slopes
    if found:
        print(table(found))
        print("not there for the second half:", ", ".join(passing) or "none")
    return found


async def roles_of(client: AsyncClient, watch: Watch) -> dict[int, str]:
    """What nodes the processes are, by whose port it is."""
    ports = {int(node.address.rpartition(":")[2]): node.role for node in (await client.model_info()).nodes}
    found: dict[int, str] = {}
    for process in watch.below():
        with suppress(psutil.NoSuchProcess):
            listening = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            found |= {process.pid: ports[port] for port in listening if port in ports}  # noqa: B035
    return found


async def all_free(client: AsyncClient) -> None:
    """Every node: nothing runs, waits or is held, no ticket is out, all pages are back, books are whole."""
    info = await client.model_info()
    assert sorted(node.role for node in info.nodes) == ["decode", "prefill"]
    end = time.monotonic() + FREE_TIMEOUT_S
    for node in info.nodes:
        async with grpc.aio.insecure_channel(node.address) as channel:
            make: Any = node_pb2_grpc.DecodeNodeStub if node.role == "decode" else node_pb2_grpc.PrefillNodeStub
            stub = make(channel)
            while not is_free(status := await _status(stub)):
                assert time.monotonic() < end, f"{node.id} is not free {FREE_TIMEOUT_S:g} s after the last: {status}"
                await asyncio.sleep(0.1)
            assert status.integrity == ""


def is_free(status: node_pb2.StatusResponse) -> bool:
    node = status.node
    back: bool = node.free_pages == node.total_pages
    return back and status.held == node.running == node.waiting == 0


async def metrics_of(http: httpx.AsyncClient) -> dict[str, dict[str | None, float]]:
    """By name and label."""
    found: dict[str, dict[str | None, float]] = {}
    for line in (await http.get("/metrics")).text.splitlines():
        if known := re.fullmatch(r'paceline_(\w+)(?:{\w+="(\w*)"})? (\S+)', line):
            found.setdefault(known[1], {})[known[2]] = float(known[3])
    return found


async def retried(http: httpx.AsyncClient) -> dict[str | None, float]:
    """Attempts that failed and were made again, by error. On the router soon nothing runs or waits, no request failed:
    it closes what a client left on the nodes before it counts that."""
    end, idle = time.monotonic() + FREE_TIMEOUT_S, {None: 0.0}
    while not (found := await metrics_of(http))["requests_running"] == found["requests_queued"] == idle:
        assert time.monotonic() < end, f"{found['requests_running']} run, {found['requests_queued']} wait"
        await asyncio.sleep(0.1)
    assert found["requests_total"].keys() <= {"ok", "cancelled"}
    retries = found.get("retries_total", {})
    print(f"attempts made again: {retries or 'none'}")
    return retries


def complaints(pids: Iterable[int]) -> list[str]:
    """What processes wrote to their logs of errors that nobody took."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/fd/2").resolve().read_text().splitlines()]
    return [line for line in lines if " ERROR " in line or "Traceback" in line or "never retrieved" in line]


async def _status(stub: Any) -> node_pb2.StatusResponse:
    answer: node_pb2.StatusResponse = await stub.Status(
        node_pb2.StatusRequest(), timeout=FREE_TIMEOUT_S, metadata=NODE_METADATA
    )
    return answer
