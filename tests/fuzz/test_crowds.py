"""An honest tenant beside each crowd: how long its first tokens take, its longest wait for a chunk, and what the router
grows to. Real processes, with API keys; ``make fuzz-surface`` runs it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator

import psutil
import pytest

from cluster.nodes.listening import raise_open_files
from paceline.client import AsyncClient
from tests.chaos.report import percentile
from tests.fuzz.campaign import FULL
from tests.fuzz.crowds import CROWDS, LOAD, Doors, beside
from tests.multihost.small_model import write_model
from tests.support.server import Server, serve

WINDOW_S = 15.0
TOKENS = 48
FIRST_TOKEN, FLOOR_S = 2.0, 0.05  # of the p99 of a first token over that without the crowd; what counts as equal
GAP_S = 0.25
ROUTER_BYTES = 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("crowds")
    keys = folder / "keys.yaml"
    entries = [f"- {{id: {name}, sha256: {_digest(name)}, tenant: {name}}}" for name in ("honest", "other")]
    keys.write_text("\n".join(["keys:", *entries, ""]))
    keys.chmod(0o600)
    nodes = ("--prefill-nodes", "1", "--decode-nodes", "1", "--no-standby", "--kv-cache-tokens", "65536")
    options = ("--model", str(write_model(folder / "model")), "--drafter", "ngram", "--api-keys", str(keys))
    with serve(*options, *nodes) as made:
        yield made


def _digest(name: str) -> str:
    return hashlib.sha256(f"pl-{name}".encode()).hexdigest()


async def honest(server: Server) -> tuple[list[float], float]:
    """Seconds to the first token of each request in a window, and the longest wait between two chunks."""
    firsts, longest, end = list[float](), 0.0, time.monotonic() + WINDOW_S
    async with AsyncClient(server.grpc, api_key="pl-honest") as client:
        while time.monotonic() < end:
            began = last = time.monotonic()
            stream = client.stream("honest", max_tokens=TOKENS, seed=1, ignore_eos=True, timeout=30)
            async with stream as chunks:
                async for chunk in chunks:
                    now = time.monotonic()
                    if chunk.first_index == 0 and chunk.token_ids:
                        firsts.append(now - began)
                    else:
                        longest = max(longest, now - last)
                    last = now
    return firsts, longest


@pytest.mark.skipif(not FULL, reason="slow: make fuzz-surface runs it")
async def test_an_honest_tenant_beside_each_crowd(server: Server) -> None:
    """The numbers are bounds for a machine with nothing else to do. What the load costs a first token is only told."""
    raise_open_files()
    process = psutil.Process(server.process.pid)
    firsts, gap = await honest(server)
    alone = percentile(firsts, 0.99)
    print(f"\nalone: {len(firsts)} requests, p99 of the first token {alone:.3f} s, longest gap {gap:.3f} s")
    problems = []
    for name in CROWDS:
        doors = Doors(server.grpc, server.http, {"authorization": "Bearer pl-other"})
        async with beside(name, doors):
            await asyncio.sleep(1.0)
            firsts, gap = await honest(server)
            size = process.memory_info().rss
        first = percentile(firsts, 0.99)
        told = f"{len(firsts)} requests, p99 {first:.3f} s, longest gap {gap:.3f} s, router {size / 2**20:.0f} MiB"
        print(f"{name}: {told}; told: {dict(doors.told)}", flush=True)
        late = name != LOAD and first > max(FIRST_TOKEN * alone, FLOOR_S)
        if late or gap > GAP_S or size > ROUTER_BYTES:
            problems.append(f"{name}: {told}")
        await asyncio.sleep(1.0)
    assert problems == []
