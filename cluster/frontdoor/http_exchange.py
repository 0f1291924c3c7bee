"""What every endpoint needs of HTTP: a bounded body in, bytes out to a client that may go away.

A client that is gone, or takes nothing for SEND_TIMEOUT_S, ends the work that is done for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Message, Receive, Send

from cluster.access.caller import owner
from cluster.frontdoor.held_bodies import PAUSE_S, HeldBodies, HeldBody
from cluster.frontdoor.http_errors import HttpProblem, dumps, problem_for
from cluster.frontdoor.http_surface import hold_body
from cluster.frontdoor.json_body import parse_object
from paceline.errors import Overloaded, quoted
from paceline.rpc.audit import network_of

MAX_BODY_BYTES = 8 * 2**20
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES  # read of a body too large; a client that sends on sees no answer
BODY_TIMEOUT_S = 60.0
BODY_START_S = 10.0  # within them a body must be there, but for what arrives at BODY_BYTES_PER_S at least
BODY_BYTES_PER_S = 128 * 1024
SEND_TIMEOUT_S = 60.0
THREAD_ABOVE_BYTES = 64 * 1024  # larger bodies are parsed off the event loop

JSON = "application/json"
T = TypeVar("T")


async def read_object(request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """What ``parse`` makes of the object that the body is. Streams go on while a large one is parsed. Raises
    InvalidRequest, and what ``parse`` and ``read_body`` raise."""
    body = await read_body(request)
    if len(body) <= THREAD_ABOVE_BYTES:
        return parse(parse_object(body))
    bodies: HeldBodies = request.app.state.bodies
    context = copy_context()  # knows who asks
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(bodies.parser, lambda: context.run(lambda: parse(parse_object(body))))


async def read_body(request: Request) -> bytes:
    """The body; never more than MAX_BODY_BYTES of it are held. Raises HttpProblem (408, 413, 415), ClientDisconnect."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON:  # a web page may make a browser send text or forms anywhere, but JSON only where it is let
        raise HttpProblem(415, f"content-type: must be {JSON}, got {quoted(kind)}", param="content-type")
    length = request.headers.get("content-length", "")
    too_large = HttpProblem(
        413,
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )
    if length.isdigit() and int(length) > MAX_DISCARDED_BYTES:
        raise too_large
    held = HeldBody(request.app.state.bodies, owner(network_of(request.client.host if request.client else "")))
    hold_body(request.scope, held)
    body, size, refused = bytearray(), 0, None
    start_s, started = min(BODY_START_S, BODY_TIMEOUT_S), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(start_s) as deadline:
            async for part in request.stream():
                size += len(part)
                deadline.reschedule(started + min(BODY_TIMEOUT_S, start_s + size / BODY_BYTES_PER_S))
                if size > MAX_DISCARDED_BYTES:
                    break
                pause_s = held.pause_s(size, len(part))
                refused = refused or _no_room(held, size, pause_s)
                if size > MAX_BODY_BYTES or refused:
                    body.clear()  # read on all the same: a client that is cut off while it sends misses the answer
                    held.release()
                else:
                    body += part
                    started += pause_s  # the client is not late
                if pause_s:
                    await asyncio.sleep(pause_s)
    except TimeoutError:
        if refused:
            raise refused from None
        took_s = asyncio.get_running_loop().time() - started
        raise HttpProblem(408, f"the body did not arrive within {took_s:.2g} s", code="timeout") from None
    if size > MAX_BODY_BYTES:
        raise too_large
    if refused:
        raise refused
    return bytes(body)


def _no_room(held: HeldBody, size: int, pause_s: float) -> HttpProblem | None:
    """Why ``size`` bytes of the body cannot be held, or read after so long a pause."""
    try:
        if pause_s >= PAUSE_S:
            raise Overloaded("request bodies come faster than they are read here")
        held.grow(min(size, MAX_BODY_BYTES))
    except Overloaded as error:
        return problem_for(error)
    return None


class ClientGone(Exception):
    """The client takes nothing more."""


class Sender:
    """Sends one answer. Every method raises ClientGone when the client takes nothing more."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        """headers: what every answer has, whatever becomes of it."""
        self._send, self._headers = send, headers
        self.started = False  # whether the status is sent

    async def whole(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """The answer in one piece."""
        data = dumps(body)
        await self.start(status, {"content-type": JSON, "content-length": str(len(data)), **headers})
        await self.write(data, last=True)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers."""
        self.started = True
        named = {**headers, **self._headers}
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in named.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def start_events(self) -> None:
        """Status and headers of server-sent events."""
        await self.start(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})

    async def write(self, data: str, last: bool = False) -> None:
        """A piece of the body. data: in ASCII."""
        await self._put({"type": "http.response.body", "body": data.encode("ascii"), "more_body": not last})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = {asyncio.create_task(work), asyncio.create_task(disconnected())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
