"""Traces through the router: what it records itself, who is asked, SDK and command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.commands.cli import app
from cluster.frontdoor.service import serve_grpc
from cluster.routing import traces
from paceline.client import AsyncClient, Client, NotFound, RequestTrace
from paceline.errors import InvalidRequest, NodeUnavailable
from paceline.trace_file import chrome_trace
from tests.support.scripted_nodes import Fleet, fleet
from tests.support.timeline import check_timeline


async def ask(nodes: Fleet, **options: Any) -> None:
    from dataclasses import replace

    from tests.support.router_asks import answer
    from tests.support.router_asks import ask as request

    await answer(nodes, replace(request(), request_id="mine", **options))


def of_router(trace: RequestTrace, track: str) -> list[str]:
    return [event.name for event in trace.events if event.node == "router" and event.track == track]


async def test_the_routers_own_events() -> None:
    async with fleet() as nodes:
        await ask(nodes)
        trace = await nodes.router.trace("mine")
        assert of_router(trace, "request") == ["planned", "request", "admitted"]
        choice = ["attempt", "reserved", "first token", "tokens", "tokens", "tokens", "handed off", "finished"]
        assert sorted(of_router(trace, "choice")) == sorted(choice)
        attempt = next(event for event in trace.events if event.name == "attempt")
        served = {"prefill": "prefill-0", "decode": "decode-0", "outcome": "ok"}
        assert attempt.attributes == served | {"prefill_hint_tokens": 0, "decode_hint_tokens": 0}
        assert {event.node for event in trace.events} == {"router", "prefill-0", "decode-0"}
        assert (trace.silent, trace.dropped) == ((), 2)
        check_timeline(chrome_trace(trace))


async def test_a_retry_shows_both_attempts() -> None:
    async with fleet(prefill=2) as nodes:
        for node in ("prefill-0", "prefill-1"):
            nodes.nodes[node].script.errors = [NodeUnavailable("told to")] if node == "prefill-0" else []
        await ask(nodes)
        trace = await nodes.router.trace("mine")
        attempts = [event for event in trace.events if event.name == "attempt"]
        outcomes = [str(event.attributes["outcome"]) for event in attempts]
        assert outcomes[-1] == "ok"
        retries = [event for event in trace.events if event.name == "retry"]
        assert len(retries) == len(attempts) - 1
        check_timeline(chrome_trace(trace))


async def test_a_silent_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(decode=2) as nodes:
        await ask(nodes)
        for node_id in ("decode-0", "decode-1"):
            nodes.nodes[node_id].trace_pause_s = 60.0
        async with asyncio.timeout(30):
            trace = await traces.collect(
                "mine", nodes.router._recorder, nodes.registry.nodes(), nodes.router._calls, timeout_s=2.0
            )
        assert trace.silent == ("decode-0", "decode-1")
        assert of_router(trace, "request")


async def test_unknown_and_empty_ids() -> None:
    async with fleet(trace_requests=3) as nodes:
        with pytest.raises(NotFound, match="their latest 3 requests"):
            await nodes.router.trace("nobody's")
        with pytest.raises(InvalidRequest, match="request_id"):
            await nodes.router.trace("")
    async with fleet(trace_requests=0) as nodes:
        with pytest.raises(NotFound, match="keeps none"):
            await nodes.router.trace("mine")


async def test_sdk_and_command(tmp_path: Path) -> None:
    async with fleet() as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        address = f"127.0.0.1:{server.port}"
        try:
            async with AsyncClient(address) as client:
                await client.generate("hello", max_tokens=10, seed=5, n=2, request_id="mine")
                trace = await client.trace("mine")
                with pytest.raises(NotFound, match="latest 256 requests"):
                    await client.trace("nobody's")
            assert {event.sequence for event in trace.events} == {"mine", "mine#0", "mine#1"}

            def blocking() -> RequestTrace:
                with Client(address) as client:
                    return client.trace("mine")

            assert len((await asyncio.to_thread(blocking)).events) == len(trace.events)
            out = tmp_path / "trace.json"
            command = ["trace", "mine", "--router", address, "--out", str(out)]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert result.exit_code == 0, result.output
            assert "events of 3 processes" in result.output
            rows = check_timeline(json.loads(out.read_text()))
            assert {"request mine", "choice mine#0", "choice mine#1"} <= set(rows)
            result = await asyncio.to_thread(CliRunner().invoke, app, ["trace", "nobody's", "--router", address])
            assert isinstance(result.exception, NotFound)
        finally:
            await server.stop(0)
