"""OpenAI-style HTTP in front of the router."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.metrics import CONTENT_TYPE, Metrics
from cluster.openai_answers import (
    ChatShape,
    CompletionShape,
    Json,
    Shape,
    error_answer,
    error_body,
    extension,
    usage_body,
)
from cluster.openai_types import Parsed, parse_chat, parse_completion, parse_json
from cluster.router import Router
from cluster.sse import DONE, EventStream, disconnected, event
from paceline.errors import ConfigError, PacelineError
from paceline.results import Chunk, Completion

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DISCARD_BYTES = 32 * 1024 * 1024  # of a body too large, read so that the client sees the answer
BODY_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 4096
KEEP_ALIVE_S = 30

Parse = Callable[[dict[str, Any]], Parsed]


def create_app(router: Router, metrics: Metrics | None = None) -> FastAPI:
    """The application. metrics: what /metrics shows, by default the router's."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    shown = metrics if metrics is not None else router.metrics

    async def models() -> Response:
        info = router.model_info()
        card = {"id": info.model, "object": "model", "created": 0, "owned_by": "paceline"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": info.max_model_len}]})

    async def completions(request: Request) -> Response:
        return await _answer(router, request, parse_completion, CompletionShape)

    async def chat_completions(request: Request) -> Response:
        return await _answer(router, request, parse_chat, ChatShape)

    async def health() -> Response:
        ready = router.ready()
        return JSONResponse({"status": "ok" if ready else "no decode node is alive"}, 200 if ready else 503)

    async def show_metrics() -> Response:
        return Response(shown.render(), media_type=CONTENT_TYPE)

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", show_metrics, methods=["GET"])
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(_: Request, error: Exception) -> Response:
    """No such path, wrong method, body too large: in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, "invalid_request_error", code=str(error.status_code))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _answer(router: Router, request: Request, parse: Parse, make_shape: Callable[..., Shape]) -> Response:
    body = await _read_body(request)
    shape = make_shape(router.tokenizer, router.served.model)
    parsed: Parsed | None = None
    try:
        parsed = parse(parse_json(body))
        if parsed.stream:
            return await _unless_disconnected(request, _stream(router, parsed, shape))
        return await _unless_disconnected(request, _complete(router, parsed, shape))
    except Exception as error:
        if not isinstance(error, PacelineError):
            log.exception("a request failed")
        status, answer, headers = error_answer(error, parsed.names if parsed is not None else {})
        return JSONResponse(answer, status, headers=headers)


async def _read_body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES. A larger body is read on, within bounds, since a client that is still sending would take
    an early answer for a broken connection."""
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_DISCARD_BYTES:
                    break
                if size <= MAX_BODY_BYTES:
                    data += part
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    if size > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes", {"Connection": "close"})
    return bytes(data)


async def _complete(router: Router, parsed: Parsed, shape: Shape) -> Response:
    return JSONResponse(shape.answer(await router.complete(parsed.request)))


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run ``work``; cancel it when the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _stream(router: Router, parsed: Parsed, shape: Shape) -> Response:
    """The first chunk is awaited, so that an error before it has its status."""
    chunks = router.generate(parsed.request)
    try:
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(_events(first, chunks, parsed, shape), chunks)


async def _events(
    first: Chunk, chunks: AsyncGenerator[Chunk, None], parsed: Parsed, shape: Shape
) -> AsyncGenerator[bytes, None]:
    writer = _StreamWriter(parsed, shape)
    try:
        async with aclosing(chunks):
            for line in writer.lines(first):
                yield line
            async for chunk in chunks:
                for line in writer.lines(chunk):
                    yield line
            for line in writer.end():
                yield line
    except Exception as error:
        if not isinstance(error, PacelineError):
            log.exception("a stream failed")
        yield event(error_answer(error, parsed.names)[1])


class _StreamWriter:
    """Chunks of one request to server-sent events."""

    def __init__(self, parsed: Parsed, shape: Shape) -> None:
        self._shape, self._include_usage = shape, parsed.include_usage
        self._request_id = parsed.request.request_id
        self._offsets: dict[int, int] = {}  # characters sent, by choice
        self._token_ids: dict[int, list[int]] = {}
        self._completions: list[Completion] = []

    def lines(self, chunk: Chunk) -> Iterator[bytes]:
        """The events of one chunk; none when it brings nothing to see."""
        if chunk.choice not in self._offsets:
            self._offsets[chunk.choice], self._token_ids[chunk.choice] = 0, []
            if (opening := self._shape.opening(chunk.choice)) is not None:
                yield self._event([opening])
        self._token_ids[chunk.choice] += chunk.token_ids
        if chunk.text or chunk.logprobs or chunk.completion:
            body = self._body([self._shape.delta(chunk, self._offsets[chunk.choice])])
            if chunk.completion is not None:
                self._completions.append(chunk.completion)
                ids = self._token_ids[chunk.choice]
                body["paceline"] = {"choices": [extension(chunk.choice, chunk.completion, ids)]}
            yield event(body)
        self._offsets[chunk.choice] += len(chunk.text)

    def end(self) -> Iterator[bytes]:
        """What follows the last chunk."""
        if self._include_usage:
            yield event(self._body([]) | {"usage": usage_body(self._completions)})
        yield DONE

    def _body(self, choices: list[Json]) -> Json:
        body = self._shape.frame(self._request_id, choices, chunk=True)
        return body | {"usage": None} if self._include_usage else body

    def _event(self, choices: list[Json]) -> bytes:
        return event(self._body(choices))


class _EmbeddedServer(uvicorn.Server):  # type: ignore[misc, unused-ignore]
    """Leaves signals to the program that it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class HttpServer:
    """A server that runs."""

    port: int
    server: uvicorn.Server
    task: asyncio.Task[None]

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let those in progress finish for ``grace_s`` seconds, then end."""
        self.server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self.server.should_exit = True
        await asyncio.wait({self.task}, timeout=grace_s + 2.0)
        if not self.task.done():
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


async def serve_http(app: FastAPI, host: str, port: int) -> HttpServer:
    """Serve on the running loop; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ConfigError("http", f"cannot listen at {host}:{port}: {error.strerror}") from None
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _EmbeddedServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    while not server.started:
        if task.done():
            task.result()
            raise ConfigError("http", f"the server at {host}:{port} ended at once")
        await asyncio.sleep(0.01)
    return HttpServer(listener.getsockname()[1], server, task)
