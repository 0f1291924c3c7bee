"""Nodes change sides, come and go under load: ``paceline role`` and ``paceline nodes`` against a real deployment. No
stream notices but by a pause.

Everything speaks TLS, so that a node that changed its role has to prove the new one."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from paceline.client import AsyncClient
from paceline.rpc.handshakes import OVER_S
from tests.multihost.small_model import write_model
from tests.support.certificates import make_folder
from tests.support.needs import needs_kernels
from tests.support.server import Server, operator, paceline, serve

pytestmark = [needs_kernels, pytest.mark.e2e, pytest.mark.timeout(300)]

OPTIONS = ("--prefill-nodes", "2", "--decode-nodes", "1", "--drafter", "ngram", "--kv-cache-tokens", "32768")
NOTICE_TIMEOUT_S = 10.0  # until the router has read what the registry knows
STREAMS, TOKENS = 4, 400
FEW = 60  # tokens of streams that nothing disturbs
REDIS = "paceline-redis-"  # in the command line of the one that ``serve`` starts: its folder
# Until a request is served that came when Redis and the only decode node were gone. Three times what is asked for:
# other tests run beside.
AGAIN_S = 45.0


async def texts(client: AsyncClient, started: asyncio.Event, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """Token ids of some streams, run together."""

    async def one(number: int) -> tuple[int, ...]:
        got: list[int] = []
        prompt = tuple(range(40 + number, 100 + number))
        stream = client.stream(prompt, max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True)
        async with stream as chunks:
            async for chunk in chunks:
                assert chunk.first_index == len(got)
                got += chunk.token_ids
                if len(got) > TOKENS // 8:
                    started.set()
        return tuple(got)

    return list(await asyncio.gather(*(one(number) for number in range(STREAMS))))


async def serve_as_before(client: AsyncClient, undisturbed: list[tuple[int, ...]]) -> None:
    """The nodes that are there give the same answers."""
    assert await texts(client, asyncio.Event(), FEW) == [ids[:FEW] for ids in undisturbed]


async def switch(server: Server, node_id: str, role: str, tls: Path) -> subprocess.CompletedProcess[str]:
    command = [paceline(), "role", node_id, role, "--admin", server.admin, "--tls-dir", str(tls)]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)


async def nodes(server: Server, tls: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(operator, "nodes", *words, "--admin", server.admin, "--tls-dir", str(tls))


async def roles(client: AsyncClient) -> dict[str, str]:
    return {node.id: node.role for node in (await client.model_info()).nodes}


async def test_nodes_change_sides_under_load(tmp_path: Path) -> None:
    tls = make_folder(tmp_path / "certs").path
    options = (
        "--model",
        str(write_model(tmp_path / "model")),
        *OPTIONS,
        "--admin",
        "127.0.0.1:0",
        "--tls-dir",
        str(tls),
    )
    with serve(*options) as server:
        failed = await handshakes_that_fail(server)
        async with AsyncClient(server.grpc, tls=tls / "ca.pem") as client:
            undisturbed = await texts(client, asyncio.Event())
            started = asyncio.Event()
            running = asyncio.create_task(texts(client, started))
            await started.wait()
            refused = await switch(server, "decode-0", "prefill", tls)
            assert refused.returncode != 0
            assert "only decode node" in refused.stderr
            for node_id, role in (("prefill-1", "decode"), ("decode-0", "prefill")):
                done = await switch(server, node_id, role, tls)
                assert done.returncode == 0, done.stderr
                assert f"{node_id} serves {role}" in done.stdout
            assert await running == undisturbed
            switched = {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "prefill"}
            async with asyncio.timeout(NOTICE_TIMEOUT_S):
                while await roles(client) != switched:
                    await asyncio.sleep(0.05)
            await serve_as_before(client, undisturbed)
            await come_and_go(server, client, tls, undisturbed)
            await are_counted(server, tls, failed)
            await redis_then_the_decode_node(server, client, tls)
            await serve_as_before(client, undisturbed)


async def handshakes_that_fail(server: Server) -> int:
    """How many: at HTTPS, gRPC and the admin port."""
    addresses = (server.http, server.grpc, server.admin)
    for address in addresses:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), NOTICE_TIMEOUT_S)
        writer.close()
    return len(addresses)


async def redis_then_the_decode_node(server: Server, client: AsyncClient, tls: Path) -> None:
    """kill -9 of the Redis that ``serve`` started, then of its only decode node: requests wait, and are served soon."""
    listed = json.loads((await nodes(server, tls, "list", "--json")).stdout)
    (decode,) = (node["pid"] for node in listed if node["role"] == "decode")
    (its_redis,) = (one for one in server.processes() if REDIS in " ".join(one.cmdline()))
    its_redis.kill()
    psutil.Process(decode).kill()
    began = time.monotonic()
    async with asyncio.timeout(AGAIN_S):
        await client.generate("again", max_tokens=4, ignore_eos=True)
    print(f"served again {time.monotonic() - began:.1f} s after Redis and the decode node were killed")


async def are_counted(server: Server, tls: Path, failed: int) -> None:
    """And none of all that did not fail. Mutants: a router that is not told of the handshakes of its HTTPS, of its gRPC
    or of its admin port."""
    counted = f'paceline_access_refused_total{{reason="Handshake"}} {failed}.0\n'
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=tls / "ca.pem")) as http:
        async with asyncio.timeout(OVER_S + NOTICE_TIMEOUT_S):
            while counted not in (await http.get(f"https://{server.http}/metrics")).text:
                await asyncio.sleep(0.5)


async def come_and_go(server: Server, client: AsyncClient, tls: Path, undisturbed: list[tuple[int, ...]]) -> None:
    """Every node is replaced under streams; beside the one decode node another comes and goes meanwhile."""
    listed = json.loads((await nodes(server, tls, "list", "--json")).stdout)
    before = {node["node_id"]: node["pid"] for node in listed}
    assert {node["state"] for node in listed} == {"ready"}
    started = asyncio.Event()
    running = asyncio.create_task(texts(client, started))
    await started.wait()
    done = await nodes(server, tls, "upgrade", "--grace", "0")  # so that streams have to move
    assert done.returncode == 0, done.stderr
    assert await running == undisturbed
    after = {node["node_id"]: node["pid"] for node in json.loads((await nodes(server, tls, "list", "--json")).stdout)}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    refused = await nodes(server, tls, "remove", "prefill-1")
    assert "prefill-1 is the only decode node that serves" in refused.stderr
    async with asyncio.timeout(NOTICE_TIMEOUT_S):
        while (await roles(client)).keys() != before.keys():  # the one that helped is gone
            await asyncio.sleep(0.05)
