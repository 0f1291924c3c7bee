"""Who may use the gRPC surface, and that strangers take nothing from the others: over a real port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from cluster.access import access
from cluster.contract.generation import GenerationRequest
from cluster.frontdoor import arriving, service
from cluster.frontdoor.held_bodies import HeldBodies
from cluster.frontdoor.service import MAX_WATCHES_OF_PEER, SERVICE, rules, serve_grpc
from cluster.state.journal import open_journal
from paceline.client import AsyncClient
from paceline.errors import DeadlineExceeded, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from paceline.request import SamplingParams
from paceline.rpc import malformed
from paceline.rpc.parts import too_many_fields
from paceline.v1 import inference_pb2
from tests.cluster.frontdoor.test_grpc_refusals import GOOD, HEALTH, REFLECTION
from tests.fakes.redis_servers import Embedded
from tests.support.api_keys import Keys, write_keys
from tests.support.scripted_nodes import Fleet, Script, fleet
from tests.support.two_routers import JOURNAL_KEY

INFERENCE = [f"/{SERVICE}/{name}" for name in ("Generate", "GenerateStream", "Tokenize", "ModelInfo", "Trace")]
WATCH = "/grpc.health.v1.Health/Watch"
BIG = [("grpc.max_send_message_length", 64 << 20)]
Code = grpc.StatusCode


class Surface:
    """A router in front of scripted nodes, with keys."""

    def __init__(self, nodes: Fleet, keys: Keys, port: int) -> None:
        self.nodes, self.keys, self.address = nodes, keys, f"127.0.0.1:{port}"

    def client(self, name: str = "", key: str | None = None) -> AsyncClient:
        return AsyncClient(self.address, api_key=key or (self.keys.secrets[name] if name else ""))

    def channel(self) -> Any:
        return grpc.aio.insecure_channel(self.address, options=BIG)

    async def told(self, opened: Any, method: str, name: str, data: bytes = b"") -> Code:
        """How a call ends; reading stops at the first answer."""
        call: Any = opened.stream_stream(method)(metadata=tuple(self.keys.header(name).items()))
        await call.write(data)
        with suppress(grpc.aio.AioRpcError):
            if await call.read() is not grpc.aio.EOF:
                call.cancel()
                return Code.OK
        code: Code = await call.code()
        return code


@asynccontextmanager
async def serving(folder: Path, bodies: HeldBodies | None = None, **options: Any) -> AsyncIterator[Surface]:
    keys = write_keys(folder / "keys.yaml")
    access = keys.access("tiny")
    async with fleet(**options) as nodes:
        nodes.router._quotas = access.quotas
        server = await serve_grpc(nodes.router, "127.0.0.1:0", access, bodies=bodies)
        try:
            yield Surface(nodes, keys, server.port)
        finally:
            await server.stop(0)


def test_every_rpc_has_a_decision() -> None:
    """Mutant: an RPC that nobody decided on."""
    methods = {f"/{SERVICE}/{method.name}" for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}
    health = {f"/grpc.health.v1.Health/{m.name}" for m in health_pb2.DESCRIPTOR.services_by_name["Health"].methods}
    kinds = rules(10).kinds
    assert set(kinds) == methods | health | {REFLECTION}
    assert {name for name, kind in kinds.items() if kind.need.value == "open"} == health


async def test_every_rpc_and_every_kind_of_key(tmp_path: Path) -> None:
    """The answer comes before a message: where it is a refusal none is sent."""
    unknown = dict.fromkeys(("", "wrong", "revoked", "expired"), Code.UNAUTHENTICATED)
    denied = dict.fromkeys(("metrics", "operator", "model"), Code.PERMISSION_DENIED)
    async with serving(tmp_path) as surface, surface.channel() as opened:
        for method in (*INFERENCE, REFLECTION):
            refused = unknown | (denied if method in INFERENCE[:3] else {})
            if method == REFLECTION:
                refused = unknown | dict.fromkeys(("acme", "metrics", "model"), Code.PERMISSION_DENIED)
            for name, code in refused.items():
                call = opened.stream_stream(method)(metadata=tuple(surface.keys.header(name).items()))
                async with asyncio.timeout(2):
                    assert await call.code() is code, (method, name)
        for method in (HEALTH, WATCH):
            assert await surface.told(opened, method, "") is Code.OK
        assert await surface.told(opened, REFLECTION, "operator", b"\x3a\x00") is Code.OK
        assert await surface.told(opened, INFERENCE[0], "acme", GOOD.SerializeToString()) is Code.OK
        assert await surface.told(opened, INFERENCE[3], "metrics") is Code.OK


async def test_strangers_take_no_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their refusals come late. Mutants: a call takes a place before its key is known; any number of refusals wait."""
    monkeypatch.setattr(service, "EXTRA_RPCS", 0)
    for name, value in (("REFUSALS_PER_S", 0.1), ("REFUSALS_AT_ONCE", 1.0), ("MAX_LATE", 6)):
        monkeypatch.setattr(access, name, value)
    async with serving(tmp_path, max_inflight=2, max_queued=2) as surface, surface.channel() as opened:
        calls: list[Any] = [opened.stream_stream(INFERENCE[0])() for _ in range(20)]
        done, late = await asyncio.wait([asyncio.ensure_future(call.code()) for call in calls], timeout=1.0)
        assert {task.result() for task in done} == {Code.UNAUTHENTICATED}
        assert len(late) == 6
        async with asyncio.timeout(2):
            assert await surface.told(opened, INFERENCE[0], "acme", GOOD.SerializeToString()) is Code.OK
        for call in calls:
            call.cancel()
        for task in late:
            task.cancel()


async def test_the_sdk_and_what_belongs_to_a_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: the trace of anybody; the tenant of the message; a salt that is the tenant's name; addresses for all."""
    async with serving(tmp_path) as surface:
        for name, shown in (("acme", False), ("operator", True)):
            assert all(bool(node.address) == shown for node in (await surface.client(name).model_info()).nodes)
        with pytest.raises(Unauthenticated):
            await surface.client().generate("hello", max_tokens=3)
        with pytest.raises(PermissionDenied):
            await surface.client("model").generate("hello", max_tokens=3)
        monkeypatch.setenv("PACELINE_API_KEY", surface.keys.secrets["acme"])
        async with AsyncClient(surface.address) as acme, surface.client("other") as other:
            request_id = (await acme.generate("hello", max_tokens=3)).request_id
            assert (await acme.trace(request_id)).events
            with pytest.raises(NotFound) as foreign:
                await other.trace(request_id)
            with pytest.raises(NotFound) as unknown:
                await other.trace("req-none")
            assert str(foreign.value).replace(request_id, "req-none") == str(unknown.value)
            assert (await surface.client("operator").trace(request_id)).events
            with pytest.raises(InvalidRequest, match=r"^tenant: "):
                await acme.generate("hello", max_tokens=3, tenant="other")
            await acme.generate("hello", max_tokens=3, tenant="acme")
        salts = [sequence.cache_salt for sequence in surface.nodes.nodes["decode-0"].sequences]
        assert salts == [salts[0]] * 2
        assert not {"", "acme", "other"} & set(salts)


async def test_tenants_that_take_one_id_find_a_trace_each(tmp_path: Path) -> None:
    """Mutants: an id that two took is nobody's; the router tells what it has of either; the second one's forgets the
    first one's."""
    async with serving(tmp_path) as surface, surface.client("acme") as acme, surface.client("other") as other:

        async def told(client: AsyncClient, request_id: str) -> list[tuple[str, str, str]]:
            found = (await client.trace(request_id)).events
            return [(event.sequence, event.track, event.name) for event in found if event.node == "router"]

        await acme.generate("hello", max_tokens=3, n=2, request_id="job")
        await other.generate("hello", max_tokens=3, request_id="alone")
        before, alone = await told(acme, "job"), await told(other, "alone")
        assert {sequence for sequence, _, _ in before} == {"job", "job#0", "job#1"}
        for taken in ("job", "job#1"):  # the second is what one of acme's choices is called
            await other.generate("hello", max_tokens=3, request_id=taken)
            assert sorted(await told(acme, "job")) == sorted(before)
            assert sorted(await told(other, taken)) == sorted((taken, *rest) for _, *rest in alone)


async def test_a_stream_is_resumed_by_its_tenant_alone(tmp_path: Path) -> None:
    """Mutant: the journal is asked with the message's tenant."""
    redis = Embedded()
    async with serving(tmp_path) as surface:
        journal = open_journal(surface.nodes.router.config, redis.url, JOURNAL_KEY)
        surface.nodes.router._journal = journal
        generation_id = "g" * 32
        first = inference_pb2.GenerateRequest(text="hello", generation_id=generation_id)
        resume = inference_pb2.GenerateRequest(generation_id=generation_id, resume=inference_pb2.Resume())
        stolen = inference_pb2.GenerateRequest(
            generation_id=generation_id, resume=inference_pb2.Resume(), tenant="acme"
        )
        async with surface.channel() as opened:

            async def told(name: str, request: inference_pb2.GenerateRequest) -> Code:
                return await surface.told(opened, INFERENCE[1], name, request.SerializeToString())

            assert await told("acme", first) is Code.OK
            async with asyncio.timeout(5):
                while await told("acme", resume) is not Code.OK:
                    await asyncio.sleep(0.02)
            assert await told("other", resume) is Code.NOT_FOUND
            assert await told("other", stolen) is Code.INVALID_ARGUMENT
        assert journal is not None
        await journal.close()
    redis.close()


async def test_watchers_take_nothing_from_others(tmp_path: Path) -> None:
    """Mutant: one bound for all RPCs, which 1,024 watchers reach."""
    async with serving(tmp_path, max_queued=4, max_inflight=4) as surface, surface.channel() as opened:
        watches = [opened.unary_stream(WATCH)(b"") for _ in range(1024)]
        answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        assert sum(isinstance(answer, bytes) for answer in answers) == MAX_WATCHES_OF_PEER
        errors = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error.code() for error in errors} <= {Code.RESOURCE_EXHAUSTED, Code.CANCELLED}  # gRPC's own, rarely
        async with surface.client("acme") as client:
            assert len((await client.generate("hello", max_tokens=3)).choices) == 1
        for watch in watches:
            watch.cancel()
        assert await surface.told(opened, HEALTH, "") is Code.OK
        async with asyncio.timeout(5):  # the places come back
            while await surface.told(opened, WATCH, "") is not Code.OK:
                await asyncio.sleep(0.02)


async def test_a_call_without_a_message_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MESSAGE_TIMEOUT_S", 0.5)
    async with serving(tmp_path) as surface, surface.channel() as opened:
        call = opened.stream_stream(INFERENCE[1])(metadata=tuple(surface.keys.header("acme").items()))
        async with asyncio.timeout(5):
            assert await call.code() is Code.DEADLINE_EXCEEDED


async def test_the_largest_message_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB of empty messages, the last of which is broken, or not. Mutants: a search through all of them; they are
    counted on the event loop."""
    readers: set[threading.Thread] = set()

    def counted(*asked: Any) -> bool:
        readers.add(threading.current_thread())
        return too_many_fields(*asked)

    monkeypatch.setattr(malformed, "too_many_fields", counted)
    empty = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()]))
    turn = empty.chat.SerializeToString()
    gaps = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    async with serving(tmp_path) as surface, surface.channel() as opened:
        beating = asyncio.create_task(beat())
        generate = opened.unary_unary(INFERENCE[0])
        for end in (b"", b"\x0a\x03\x0a\x01\xff"):
            chat = turn * ((4 * 2**20 - 64) // len(turn)) + end
            length = len(chat)
            size = b""
            while length:
                size += bytes([length & 127 | (128 if length > 127 else 0)])
                length >>= 7
            number = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(
                    bytes([number << 3 | 2]) + size + chat, metadata=tuple(surface.keys.header("acme").items())
                )
            assert caught.value.code() is Code.INVALID_ARGUMENT
        beating.cancel()
        assert max(gaps) < 0.5, max(gaps)  # the search took 5.3 s, parsing alone 150 ms
        assert readers
        assert threading.main_thread() not in readers


@pytest.mark.parametrize("name", ["a\nb", "a\r2026 ERROR", "\u2028", "\x1b[2J"])
async def test_names_that_would_forge_logs(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as surface, surface.client("acme") as client:
        with pytest.raises(InvalidRequest, match=r"^request_id: .*control"):
            await client.generate("hello", max_tokens=3, request_id=name)
        with pytest.raises(InvalidRequest, match=r"^request_id: .*control"):
            await surface.client("operator").trace(name)


@pytest.mark.parametrize("n", [1, 40], ids=["one", "more choices than chunks that may wait"])
async def test_a_client_that_does_not_read_loses_its_request_and_not_the_nodes(n: int) -> None:
    """Mutants: no bound on how long a full queue waits; it is told that the router stops, which clients try again."""
    async with fleet(read_timeout_s=0.3, max_inflight=n) as nodes:
        nodes.nodes["decode-0"].script = Script(round_size=1)
        stream = nodes.router.generate(GenerationRequest("hello", SamplingParams(n=n, seed=5, ignore_eos=True), 100))
        await anext(stream)
        async with asyncio.timeout(5):
            while not all(task.done() for task in nodes.router._tasks):
                await asyncio.sleep(0.02)
        with pytest.raises(DeadlineExceeded, match="chunks waiting"):
            async for _ in stream:
                pass
        await nodes.idle()


@pytest.mark.parametrize("where", ["for its turn", "at a node"])
async def test_others_wait_a_fifth_as_long_for_a_client_that_does_not_read(where: str) -> None:
    """Mutants: every second counts alike; nobody asks whether one waits there."""
    async with fleet(read_timeout_s=10, max_inflight=1) as nodes:
        node = nodes.nodes["decode-0"]
        node.script = Script(round_size=1)
        stream = nodes.router.generate(GenerationRequest("hello", SamplingParams(seed=5, ignore_eos=True), 100))
        await anext(stream)
        (running,) = nodes.router._tasks
        if where == "at a node":
            nodes.registry.records["decode-0"] = replace(node.record, waiting=1)
        else:
            late = nodes.router.generate(GenerationRequest("late", SamplingParams(seed=6, ignore_eos=True), 2))
            first = asyncio.ensure_future(anext(late))
        async with asyncio.timeout(7):  # and 2.5 s are enough
            while not running.done():
                await asyncio.sleep(0.02)
            if where == "for its turn":
                await first
                await late.aclose()
        with pytest.raises(DeadlineExceeded, match="chunks waiting"):
            async for _ in stream:
                pass
