"""Every edge of a hand-off is an event, once and in order, on both nodes; so is the end of its pages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import grpc.aio

from cluster.routing.router import Router
from paceline.config import ServeConfig
from paceline.request import SequenceRequest
from paceline.results import RequestTrace, TraceEvent
from paceline.trace_file import chrome_trace
from paceline.v1 import trace_pb2
from paceline.wire import trace_from_proto
from tests.fakes.nodes import Cluster, cluster, node_config, sequence_request, wait_until
from tests.fakes.runner import FakeRunner
from tests.support.byte_text import ByteTokenizer
from tests.support.scripted_nodes import FakeRegistry
from tests.support.timeline import check_timeline


async def read(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass


async def events_of(nodes: Cluster, request: SequenceRequest) -> dict[str, list[TraceEvent]]:
    """Both nodes' events by track; the whole must be a sound timeline."""
    asked = trace_pb2.TraceRequest(request_id=request.request_id)
    parts = [await stub.Trace(asked) for stub in (nodes.prefill_stub, nodes.decode_stub)]
    events = [event for part in parts for event in trace_from_proto("", part).events]
    check_timeline(chrome_trace(RequestTrace("", tuple(events))))
    tracks: dict[str, list[TraceEvent]] = {}
    for event in events:
        tracks.setdefault(event.track, []).append(event)
    return tracks


def edges(tracks: dict[str, list[TraceEvent]]) -> list[str]:
    return [e.name.removeprefix("hand-off ") for e in tracks["receive"] if e.name.startswith("hand-off ")]


def names(events: list[TraceEvent]) -> list[str]:
    """Without repeats in a row."""
    found = [event.name for event in events]
    return [name for i, name in enumerate(found) if i == 0 or found[i - 1] != name]


def hold_in(runner: FakeRunner, forward: int) -> threading.Event:
    """Its engine stays in that forward until the gate is opened; set once it is there."""
    reached, go_on = threading.Event(), runner._forward

    def counted() -> None:
        nonlocal forward
        forward -= 1
        if forward == 0:
            runner.gate.clear()
            reached.set()
        go_on()

    runner._forward = counted  # type: ignore[method-assign]
    return reached


async def test_a_normal_request() -> None:
    async with cluster() as nodes:
        request = sequence_request()
        outcome = await nodes.generate(request)
        await nodes.wait_for_release()
        tracks = await events_of(nodes, request)
        assert edges(tracks) == ["reserved", "sending", "ready", "released"]
        assert names(tracks["decode"]) == ["queued", "hand-off", "round", "finished", "pages released"]
        assert names(tracks["prefill"]) == [
            "queued",
            "chunk",
            "hand-off begin",
            "chunk",
            "first token",
            "exposed transfer",
            "hand-off acknowledged",
            "pages released",
        ]
        assert names(tracks["send"]) == ["begin sent", "chunk sent", "state sent"]
        rounds = [event for event in tracks["decode"] if event.name == "round"]
        assert [e.attributes["accepted"] for e in rounds] == [float(r.num_accepted) for r in outcome.rounds]
        for track, name in (("send", "chunk sent"), ("receive", "chunk received")):
            crossed: dict[str, float] = {}
            for event in tracks[track]:
                if event.name == name:
                    byte_class, num_bytes = str(event.attributes["byte_class"]), float(event.attributes["num_bytes"])
                    crossed[byte_class] = crossed.get(byte_class, 0) + num_bytes
            assert outcome.handed_off is not None
            assert crossed["target_kv"] == outcome.handed_off.bytes.target_kv
        exposed = next(event for event in tracks["prefill"] if event.name == "exposed transfer")
        assert exposed.end_s is not None
        assert outcome.handed_off is not None
        assert abs(exposed.end_s - exposed.start_s - outcome.handed_off.exposed_s) < 1e-5
        assert exposed.attributes["transfer_s"] == outcome.handed_off.transfer_s > 0.0


async def test_the_client_leaves_before_the_transfer() -> None:
    async with cluster() as nodes:
        request = sequence_request()
        decode = nodes.open_decode(request)
        await anext(aiter(decode))
        decode.cancel()
        await nodes.wait_for_release()
        tracks = await events_of(nodes, request)
        assert edges(tracks) == ["reserved", "failed"]
        assert names(tracks["decode"]) == ["queued", "client left", "failed", "pages released"]


async def test_the_client_leaves_while_rows_cross() -> None:
    async with cluster() as nodes:
        held = hold_in(nodes.prefill_runner, 4)
        request = sequence_request(num_prompt=100)
        decode = nodes.open_decode(request)
        reserved = (await anext(aiter(decode))).reserved
        prefill = nodes.open_prefill(request, reserved)
        follower = asyncio.create_task(read(prefill))
        stream = nodes.decode._engine.streams[reserved.ticket]
        landing = stream.landing
        assert landing is not None
        await wait_until(held.is_set, 5.0, "the forward that holds the engine")
        await wait_until(lambda: any(landing.handoff.bytes_by_class.values()), 5.0, "the first rows")
        prefill.cancel()
        await follower
        await wait_until(lambda: nodes.prefill.shell._active == 0, 5.0, "the prefill node to notice")
        decode.cancel()
        await wait_until(lambda: stream.left, 5.0, "the decode node to notice")
        nodes.prefill_runner.gate.set()
        await nodes.wait_for_release()
        tracks = await events_of(nodes, request)
        assert edges(tracks) == ["reserved", "sending", "failed"]
        assert names(tracks["decode"]) == ["queued", "client left", "failed", "pages released"]
        ends = [name for name in names(tracks["prefill"]) if name not in ("queued", "chunk", "hand-off begin")]
        assert ends == ["given up", "hand-off failed", "pages released"]
        assert names(tracks["send"])[-1] == "abort sent"


async def test_a_transfer_that_fails() -> None:
    async with cluster(decode_config=node_config(handoff_deadline_s=0.4, page_size=8)) as nodes:
        hold_in(nodes.prefill_runner, 3)
        request = sequence_request(num_prompt=60)
        decode = nodes.open_decode(request)
        reserved = (await anext(aiter(decode))).reserved
        follower = asyncio.create_task(read(nodes.open_prefill(request, reserved)))
        await read(decode)
        nodes.prefill_runner.gate.set()
        await follower
        await nodes.wait_for_release()
        tracks = await events_of(nodes, request)
        assert edges(tracks) == ["reserved", "sending", "failed"]
        failed = [event for event in tracks["receive"] if event.name == "hand-off failed"]
        assert "did not finish" in str(failed[0].attributes["reason"])
        assert names(tracks["decode"]) == ["queued", "failed", "pages released"]
        assert names(tracks["prefill"])[-2:] == ["hand-off failed", "pages released"]


async def test_local_prefill() -> None:
    async with cluster() as nodes:
        request = sequence_request()
        await nodes.generate_locally(request)
        await nodes.wait_for_release()
        tracks = await events_of(nodes, request)
        assert set(tracks) == {"decode"}
        assert names(tracks["decode"]) == ["queued", "chunk", "round", "finished", "pages released"]


async def test_off() -> None:
    config = node_config(trace_requests=0)
    async with cluster(config, config) as nodes:
        request = sequence_request()
        await nodes.generate(request)
        await nodes.wait_for_release()
        assert await events_of(nodes, request) == {}


async def test_router_and_real_nodes_in_one_timeline() -> None:
    from cluster.contract.generation import GenerationRequest
    from cluster.state.registry_types import NodeRecord
    from paceline.request import SamplingParams

    async with cluster() as nodes:
        registry = FakeRegistry()
        for info in (nodes.prefill.shell.load(), nodes.decode.shell.load()):
            registry.records[info.id] = NodeRecord(
                info.id, info.role, 1, info.address, free_pages=info.free_pages, total_pages=info.total_pages
            )
        router = Router(registry, ByteTokenizer(), ServeConfig(model="fake"), "fake", 512, 1000)
        params = SamplingParams(seed=5, n=2, ignore_eos=True)
        await router.complete(GenerationRequest(tuple(range(100, 121)), params, 9, request_id="mine"))
        await nodes.wait_for_release()
        rows = check_timeline(chrome_trace(await router.trace("mine")))
        tracks = ("choice", "prefill", "send", "decode", "receive")
        assert set(rows) == {"request mine"} | {f"{track} mine#{i}" for track in tracks for i in range(2)}
        assert set(rows["request mine"]) == {"request", "planned", "admitted"}
        await router.close()
