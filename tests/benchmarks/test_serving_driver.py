"""The driver against a scripted server: an open loop with limits, deadlines, and every failure counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks.serving.client import API, Limits, Outcome, Server, drive, served_model
from benchmarks.serving.workload import Ask

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asks(*at_s: float) -> list[Ask]:
    return [Ask(i, at, f"question {i}", 7, 5, 40 + i) for i, at in enumerate(at_s)]


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "scripted"}]})


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_post("/v1/completions", handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, *events: object, pause: asyncio.Event | None = None) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        line = event if isinstance(event, str) else f"data: {json.dumps(event)}"
        await response.write(f"{line}\r\n\r\n".encode())
    if pause is not None:
        await pause.wait()
    return response


def chat(text: str, end: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": end}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


async def test_a_stream_is_read_and_counted_by_the_servers_usage() -> None:
    bodies = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await streamed(request, chat(""), chat("Hel"), ": comment", chat("lo", "stop"), USAGE, "data: [DONE]")

    async with serving(answer) as url:
        assert await served_model(url + "/v1") == "scripted"
        (one,) = await drive(Server(url, "scripted", temperature=0.5), asks(0.0), Limits())
    assert (one.text, one.error, len(one.stamps)) == ("Hello", "", 2)  # the empty piece is no token
    assert (one.prompt_tokens, one.output_tokens, one.counted) == (9, 5, True)
    assert 0 < one.stamps[0] <= one.stamps[1] <= one.end_s
    (body,) = bodies
    assert body["messages"] == [{"role": "user", "content": "question 0"}]
    assert (body["model"], body["temperature"], body["seed"], body["max_tokens"]) == ("scripted", 0.5, 40, 5)
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body


async def test_completions_of_a_server_that_tells_no_usage() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["prompt"] == "question 0"
        pieces = [{"choices": [{"text": text, "finish_reason": end}]} for text, end in (("a", None), ("b", "length"))]
        return await streamed(request, *pieces, "data: [DONE]")

    api: API = "completions"
    async with serving(answer) as url:
        (one,) = await drive(Server(url, api=api), asks(0.0), Limits())
    assert (one.text, one.output_tokens, one.prompt_tokens, one.counted, one.error) == ("ab", 2, 7, False, "")


async def test_a_slow_server_delays_no_later_request() -> None:
    """No request is answered before the last has arrived: a closed loop would never get there."""
    arrived, all_here = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == 4:
            all_here.set()
        await all_here.wait()
        return await streamed(request, chat("x", "stop"), USAGE, "data: [DONE]")

    heard: list[Outcome] = []
    async with serving(answer) as url:
        found = await drive(Server(url), asks(0.0, 0.05, 0.1, 0.3), Limits(deadline_s=30.0), heard.append)
    assert [one.error for one in found] == [""] * 4
    assert [one.ask.number for one in found] == [0, 1, 2, 3]
    assert len(heard) == 4
    # Counted from when each was due: the first waited for the last, which came 0.3 s later.
    assert found[0].stamps[0] >= 0.3
    assert found[0].stamps[0] > found[3].stamps[0]


async def test_beyond_the_limit_a_request_fails_at_once() -> None:
    release = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await streamed(request, chat("x", "stop"), USAGE, "data: [DONE]")

    def failed(outcome: Outcome) -> None:
        if outcome.ask.number == 3:
            release.set()

    async with serving(answer) as url:
        found = await drive(Server(url), asks(0.0, 0.0, 0.1, 0.2), Limits(outstanding=2, deadline_s=30.0), failed)
    assert [bool(one.error) for one in found] == [False, False, True, True]
    assert found[2].error == "2 requests are outstanding"


async def test_a_deadline_ends_a_request_that_has_begun() -> None:
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await streamed(request, chat("x"), pause=never)

    async with serving(answer) as url:
        (one,) = await drive(Server(url), asks(0.0), Limits(deadline_s=0.3))
        never.set()
    assert one.error == "not complete 0.3 s after it was due"
    assert len(one.stamps) == 1


@pytest.mark.parametrize(
    ("events", "status", "told"),
    [
        ([], 429, "status 429: too many"),
        ([chat("x"), {"error": {"message": "node lost"}}], 200, "node lost"),
        ([chat("x"), USAGE], 200, "without a finish reason"),
        ([chat("x"), "data: {broken"], 200, "Expecting property name"),
    ],
)
async def test_failures_are_kept_with_their_reason(events: list[object], status: int, told: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if status != 200:
            return web.Response(status=status, text="too many")
        return await streamed(request, *events)

    async with serving(answer) as url:
        (one,) = await drive(Server(url), asks(0.0), Limits())
    assert told in one.error


async def test_a_server_that_is_not_there() -> None:
    async with serving(models) as url:
        pass
    (one,) = await drive(Server(url), asks(0.0), Limits())
    assert "Cannot connect" in one.error


async def test_a_cancelled_run_leaves_no_request() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            return await streamed(request, chat("x"), pause=asyncio.Event())
        finally:
            ended.set()

    async with serving(answer) as url:
        run = asyncio.create_task(drive(Server(url), asks(0.0, 600.0), Limits()))
        await began.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert len(asyncio.all_tasks()) < 10
        assert not [task for task in asyncio.all_tasks() if "_bounded" in repr(task)]
