"""Hostile frames at all ports: none is handled, no process dies, memory is bounded, and honest streams do not wait."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil

from tests.fakes.nodes import sequence_request
from tests.fakes.runner import expected_output
from tests.fuzz.campaign import FULL, GAP_S, SEED, Kept
from tests.fuzz.deployment import Deployment
from tests.fuzz.hostile_frames import HIDDEN, HTTP1, HTTP2, Maker, begin, some, throw, tls_records, wrong_messages
from tests.support.all_ports import IN, PORTS, Credential, context_of, deployed
from tests.support.all_ports import Deployment as AllPorts
from tests.support.certificates import make_folder, secured

FRAMES = 10 * FULL or 500
SLOW_BYTES = 200 if FULL else 10  # that a slow connection sends, ten a second
AT_ONCE, SLOW_AT_ONCE = 24, 12
MEMORY = 300 * 2**20  # bytes that a process may grow by
PLACES_S = 40.0  # gRPC counts a connection whose client left within a call for some 30 s more; the admin port has 64
TOLD_S = 30.0  # until a router shows what a node has counted


async def drip(address: str, data: bytes) -> None:
    """One byte at a time, and never to its end."""
    host, _, port = address.rpartition(":")
    with suppress(ConnectionError, OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        for byte in data[:SLOW_BYTES]:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.close()


async def throw_all(address: str, makers: Sequence[Maker], count: int, name: str) -> int:
    """``count`` frames, many connections at once, and slow ones beside them; how many were written."""
    limit, written, number = asyncio.Semaphore(AT_ONCE), 0, 0

    async def one(which: int) -> int:
        async with limit:
            return await throw(address, some(makers, which, SEED))

    slow = [asyncio.create_task(drip(address, b"".join(begin()) + bytes(SLOW_BYTES))) for _ in range(SLOW_AT_ONCE)]
    while written < count:
        written += sum(await asyncio.gather(*(one(number + i) for i in range(AT_ONCE))))
        number += AT_ONCE
    await asyncio.gather(*slow)
    print(f"{name}: {written} frames on {number} connections", flush=True)
    return written


async def test_no_port_of_a_deployment_handles_them(served: Deployment, kept: Kept) -> None:
    """And nodes count what they refuse. Mutants: h11's strictness about lengths is off; a limit of gRPC's metadata is
    lifted; nodes count no message that is none of its RPC."""
    memory = {name: psutil.Process(process.pid).memory_info().rss for name, process in served.processes.items()}
    handled, refused, written = _finished(served), _refused(served), dict[str, int]()
    async with served.honest.beside(served.grpc, served.http) as honest:
        written["router gRPC"] = await throw_all(served.grpc, HTTP2, FRAMES * 3 // 10, "router gRPC")
        written["HTTP"] = await throw_all(served.http, HTTP1, FRAMES // 20, "HTTP")  # a frame is a connection
        for role, address in served.nodes.items():
            written[role] = await throw_all(address, HTTP2, FRAMES * 3 // 10, f"{role} node")
    grown = {
        name: round((psutil.Process(process.pid).memory_info().rss - memory[name]) / 2**20, 1)
        for name, process in served.processes.items()
    }
    print(f"{honest}; grown by {grown} MiB")
    hostile = _finished(served) - handled - sum(honest.done.values())
    kept["frames"] = {"written": written, "handled": hostile, "grown_mib": grown, "honest": asdict(honest)}
    assert hostile == 0, "something hostile was handled"
    assert all(grown_by < MEMORY / 2**20 for grown_by in grown.values()), grown
    assert honest.problems(GAP_S) == []
    await asyncio.to_thread(served.check)
    await asyncio.to_thread(served.at_rest)
    async with asyncio.timeout(TOLD_S):  # with a renewal of their leases
        while late := [role for role in served.nodes if _refused(served)[f"{role}-0"] <= refused[f"{role}-0"]]:
            for role in late:  # a busy node may have taken none before its caller left
                await throw(served.nodes[role], wrong_messages(random.Random(SEED)))


def _refused(served: Deployment) -> dict[str, float]:
    """Messages that each node refused, as the router shows them."""
    text = httpx.get(f"http://{served.http}/metrics", timeout=10).text
    found = re.findall(r'paceline_node_refused_messages_total{node="(.*?)"} (.*)', text)
    assert {node for node, _ in found} == {"prefill-0", "decode-0"}
    return {node: float(count) for node, count in found}


def _finished(served: Deployment) -> int:
    """Requests that were answered."""
    text = httpx.get(f"http://{served.http}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith('paceline_requests_total{status="ok"')]
    return int(sum(float(line.split()[-1]) for line in lines))


async def test_a_control_stream_with_tls_handles_none(tmp_path: Path, kept: Kept) -> None:
    """From strangers, and from a prefill node with a certificate that has gone mad."""
    folder = make_folder(tmp_path / "a")
    context = ssl.create_default_context(cafile=folder.path / "ca.pem")
    context.load_cert_chain(folder.path / "prefill.pem", folder.path / "prefill.key")
    context.set_alpn_protocols(["h2"])
    count, written = FRAMES // 10, Counter[str]()
    async with secured(folder) as nodes:
        address, number = nodes.decode_address, 0
        while min(written["stranger"], written["prefill"]) < count // 2:
            strangers = [throw(address, some((tls_records, *HTTP2), number + i, SEED)) for i in range(8)]
            mad = [throw(address, some(HTTP2, number + i, SEED), context, "decode.paceline") for i in range(8)]
            thrown = await asyncio.gather(*strangers, *mad)
            written["stranger"] += sum(thrown[:8])
            written["prefill"] += sum(thrown[8:])
            number += 8
        print(f"control stream with TLS: {dict(written)} frames")
        kept["frames to a control stream with TLS"] = dict(written)
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)  # a client that means well is served
        await nodes.wait_for_release()


async def test_ports_with_tls_and_keys_handle_none(tmp_path: Path, kept: Kept) -> None:
    """From strangers, and from who has a certificate that the port takes and no key. Mutant: HTTPS asks for no
    key."""
    async with deployed(tmp_path) as deployment:
        written = Counter[str]()
        for at in ("router gRPC", "HTTPS", "admin", "prefill node"):
            port, makers = PORTS[at], HTTP1 if at == "HTTPS" else HTTP2
            context = context_of(Credential(deployment.folder, port.role, ""))
            context.set_alpn_protocols(["http/1.1" if at == "HTTPS" else "h2"])
            name = "" if port.server == "server" else f"{port.server}.paceline"
            address, number = deployment.addresses[at], 0
            while written[at] < FRAMES // 20:
                strangers = [throw(address, some((tls_records, *makers), number + i, SEED)) for i in range(8)]
                inside = [throw(address, some(makers, number + i, SEED), context, name) for i in range(8)]
                written[at] += sum(await asyncio.gather(*strangers, *inside))
                number += 8
            await throw(address, [HIDDEN], context, name)  # well-formed, and without a key
        print(f"with TLS and keys: {dict(written)} frames")
        kept["frames with TLS and keys"] = dict(written)
        told = deployment.router.metrics.render().decode() + deployment.metrics.render().decode()
        assert "paceline_requests_total{" not in told, "something hostile was looked at"
        ends = await asyncio.gather(*(_served(deployment, at) for at in PORTS))
        assert dict(zip(PORTS, ends, strict=True)) == dict.fromkeys(PORTS, IN), "callers that mean well are not served"


async def _served(deployment: AllPorts, at: str) -> str:
    """How a caller ends who means well, and asks again while gRPC counts connections that are gone."""
    port, until = PORTS[at], time.monotonic() + PLACES_S
    while True:
        end = await deployment.ask(port, at, Credential(deployment.folder, port.role, port.key))
        if end == IN or time.monotonic() > until:
            return end
        await asyncio.sleep(1.0)
