"""Messages of gRPC calls are bounded in bytes before they are read, while they arrive, and while they are held."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.access import access
from cluster.frontdoor import arriving
from cluster.frontdoor.held_bodies import SMALL_BYTES, HeldBodies
from cluster.frontdoor.http import HttpOptions, create_app
from cluster.routing.metrics import Metrics
from tests.cluster.frontdoor.test_gate import INFERENCE, WATCH, Surface, serving
from tests.cluster.frontdoor.test_grpc_refusals import GOOD, HEALTH
from tests.fuzz import hostile_frames as http2
from tests.support.fake_router import FakeRouter

Code = grpc.StatusCode
WINDOW = 65_536  # bytes of a call that nobody reads


class Calls:
    """Calls whose message does not come, until they are ended."""

    def __init__(self, surface: Surface, opened: Any) -> None:
        self._surface, self._opened, self._open = surface, opened, list[Any]()

    async def refused(self, method: str, name: str, count: int) -> list[str]:
        """What those are told that are refused."""
        header = tuple(self._surface.keys.header(name).items()) if name else ()
        made = [self._opened.stream_stream(method)(metadata=header) for _ in range(count)]
        self._open += made
        done, _ = await asyncio.wait([asyncio.ensure_future(_told(call)) for call in made], timeout=1.0)
        return sorted(task.result() for task in done)

    def end(self) -> None:
        for call in self._open:
            call.cancel()


async def _told(call: Any) -> str:
    return f"{(await call.code()).name} {await call.details()}"


def padded(size: int) -> bytes:
    """A good request of about ``size`` bytes, most of them in a field that may be left out."""
    length = bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    return GOOD.SerializeToString() + b"\xc2\x3e" + length + bytes(size)


async def test_messages_that_are_slow_are_bounded_and_fast_ones_still_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: any number; one owner may have all; strangers take what is for those with a key; a place that does not
    come back."""
    monkeypatch.setattr(arriving, "MOST_SLOW", 4)
    monkeypatch.setattr(arriving, "MOST_SLOW_OPEN", 2)
    async with serving(tmp_path) as surface, surface.channel() as opened:
        calls, full = Calls(surface, opened), ["RESOURCE_EXHAUSTED too many messages are on their way here"]
        for _ in range(2):
            assert await calls.refused(INFERENCE[1], "acme", 5) == full * 3  # of the tenant's half
            assert await calls.refused(WATCH, "", 2) == await calls.refused(HEALTH, "", 1) == full  # of the address's
            assert await calls.refused(INFERENCE[0], "other", 2) == []
            assert await surface.told(opened, INFERENCE[0], "acme", GOOD.SerializeToString()) is Code.OK
            assert await surface.told(opened, HEALTH, "") is Code.OK
            calls.end()
            await asyncio.sleep(0.2)


async def test_messages_that_are_there_share_the_bytes_of_bodies(tmp_path: Path) -> None:
    """Mutants: they are not counted; only while they are read; one owner may have all; gRPC has bytes of its own; small
    ones count; bytes that are not given back."""
    bodies, size = HeldBodies(2**20), 200_000
    async with serving(tmp_path, bodies=bodies) as surface, surface.channel() as opened:
        gate = surface.nodes.nodes["decode-0"].script.gate = asyncio.Event()
        told: Counter[str] = Counter()

        async def ask(name: str, data: bytes) -> None:
            told[f"{name} {(await surface.told(opened, INFERENCE[0], name, data)).name}"] += 1

        asking = [asyncio.create_task(ask(name, padded(size))) for name in ("acme", "other") for _ in range(3)]
        small = asyncio.create_task(ask("acme", padded(SMALL_BYTES - 1000)))
        async with asyncio.timeout(5):
            while told.total() < 2 or len(surface.nodes.nodes["decode-0"].sequences) < 5:
                await asyncio.sleep(0.01)
        assert told == {"acme RESOURCE_EXHAUSTED": 1, "other RESOURCE_EXHAUSTED": 1}
        assert 4 * size < bodies.total < 4 * size + 1000
        app = create_app(FakeRouter(), Metrics(), HttpOptions(bodies=bodies))
        body = b'{"prompt":"hi"}'.ljust(300_000)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            asked = [(await client.post("/v1/completions", content=body, headers=headers)).status_code]
            gate.set()
            await asyncio.gather(*asking, small)
            asked.append((await client.post("/v1/completions", content=body, headers=headers)).status_code)
        assert asked == [429, 200]
        assert told["acme OK"] == 3
        assert bodies.total == 0


async def test_what_needs_no_key_has_small_messages(tmp_path: Path) -> None:
    """Mutant: they count as others do, and fill what is for those with a key."""
    async with serving(tmp_path) as surface, surface.channel() as opened:
        name = b"\x0a" + padded(SMALL_BYTES)[-SMALL_BYTES - 3 :]
        assert await surface.told(opened, HEALTH, "", name) is Code.INVALID_ARGUMENT
        assert await surface.told(opened, INFERENCE[3], "acme", b"") is Code.OK


async def test_a_call_that_nobody_reads_holds_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a key, whose refusal comes late. Mutant: gRPC's own windows, which grow to 64 MiB."""
    for name, value in (("REFUSALS_PER_S", 0.1), ("REFUSALS_AT_ONCE", 1.0), ("REFUSAL_LATE_S", 5.0)):
        monkeypatch.setattr(access, name, value)
    async with serving(tmp_path) as surface:
        assert await sent_unread(surface.address, 32) <= 32 * WINDOW


async def sent_unread(address: str, count: int) -> int:
    """Bytes that a client may send within a second in ``count`` calls."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    streams = range(1, 2 * count, 2)
    windows, sent = dict.fromkeys((0, *streams), WINDOW - 1), 0  # 0: that of the connection
    opening = [http2.frame(http2.HEADERS, http2.END_HEADERS, i, http2.headers_block(INFERENCE[0])) for i in streams]
    writer.write(b"".join(http2.begin() + opening))

    async def follow() -> None:
        initial = WINDOW - 1
        while True:
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == http2.WINDOW and stream in windows:
                windows[stream] += int.from_bytes(body, "big")
            elif kind in (http2.PING, http2.SETTINGS) and not flags:
                writer.write(http2.frame(kind, 1, 0, body if kind == http2.PING else b""))
                for name, value in struct.iter_unpack(">HI", body) if kind == http2.SETTINGS else ():
                    if name == 4:  # the initial window of every stream
                        for one in streams:
                            windows[one] += value - initial
                        initial = value

    following = asyncio.create_task(follow())
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        for stream in streams:
            size = min(windows[0], windows[stream], 16_384)
            if size > 0:
                writer.write(http2.frame(http2.DATA, 0, stream, bytes(size)))
                windows[0], windows[stream], sent = windows[0] - size, windows[stream] - size, sent + size
        await writer.drain()
        await asyncio.sleep(0)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    writer.close()
    return sent
