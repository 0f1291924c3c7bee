"""OpenAI-compatible HTTP in front of the router.

A request: body read (bounded) -> parsed -> ``router.generate`` -> one body, or server-sent events. An error before the
first byte is a status, after it an ``error`` event. A client that goes away, or takes nothing for SEND_TIMEOUT_S, ends
the generation at once. `cluster.frontdoor.http_surface` is around all paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from cluster.contract.generation import GenerationRequest, Prompt
from cluster.contract.plan import Plan
from cluster.frontdoor import openapi
from cluster.frontdoor.http_errors import HttpProblem, check_model, dumps, model_not_found, problem_for
from cluster.frontdoor.http_server import HttpServer, serve_http
from cluster.frontdoor.http_surface import IGNORED, SurfaceApp, request_id
from cluster.frontdoor.http_tokens import TokenText, add_tokens
from cluster.frontdoor.json_body import parse_object
from cluster.frontdoor.openai_answers import Health, Model, Models, NodeCounts, Version
from cluster.frontdoor.openai_parse import ApiRequest, parse_chat, parse_completion
from cluster.frontdoor.openai_stream import Answer
from cluster.frontdoor.openai_stream import Decoder as AnswerTokens
from cluster.frontdoor.prompts import AskedPrompt, generate_all, read_prompts
from cluster.routing.metrics import CONTENT_TYPE, Metrics
from paceline.errors import InvalidRequest, PacelineError, quoted
from paceline.results import Chunk, ModelInfo, Tokenization

__all__ = ["HttpServer", "create_app", "serve_http"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES  # read of a body too large; a client that sends on sees no answer
BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0

JSON = "application/json"

Parser = Callable[[dict[str, Any], str], ApiRequest]


class ServingTokenizer(AnswerTokens, TokenText, Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as HTTP needs it."""


class Serving(Protocol):
    """cluster.routing.router.Router, as far as HTTP needs it."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = ...
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they come. Closing it cancels the request. on_plan: called before the first."""

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """Token ids of a text or a chat."""

    def model_info(self) -> ModelInfo:
        """What is served and how."""

    def ready(self) -> bool:
        """Whether a decode node is there to serve."""


@dataclass(frozen=True)
class HttpOptions:
    """What the deployment says of its HTTP surface."""

    cors_origins: tuple[str, ...] = ()  # of web pages that may ask; ``*`` is any
    fingerprint: str = ""  # names what the text depends on besides the request


def create_app(router: Serving, metrics: Metrics, options: HttpOptions = HttpOptions()) -> FastAPI:
    """The application. metrics: what ``/metrics`` shows; requests that do not reach the router are counted in it."""
    app = SurfaceApp(
        title=openapi.TITLE,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        origins=options.cors_origins,
    )
    _add_generation(app, router, metrics, options.fingerprint)
    _add_models(app, router)
    add_tokens(app, router, _read_object)
    _add_operations(app, router, metrics)

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refusal(HttpProblem(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    async def on_error(_: Request, error: Exception) -> Response:
        return _refusal(problem_for(error))

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(HttpProblem, on_error)
    app.add_exception_handler(PacelineError, on_error)
    app.add_exception_handler(Exception, on_error)
    _add_document(app)
    return app


def _add_generation(app: FastAPI, router: Serving, metrics: Metrics, fingerprint: str) -> None:
    async def answer(request: Request, parse: Parser, prefix: str) -> Response:
        try:
            parsed = parse(await _read_object(request), request_id(request.scope, prefix))
            served = router.model_info().model
            check_model(parsed.generation.model, served)
            prompts = await read_prompts(router, parsed)
        except (InvalidRequest, HttpProblem):
            metrics.request_refused(InvalidRequest.__name__)
            raise
        metrics.fields_ignored(parsed.ignored)
        return _Reply(router, parsed, Answer(parsed, served, router.tokenizer, prompts, fingerprint), prompts)

    @app.post("/v1/completions", **openapi.COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Continue a prompt, which is a text or token ids. With `stream` the answer is server-sent events."""
        return await answer(request, parse_completion, "cmpl")

    @app.post("/v1/chat/completions", **openapi.CHAT_COMPLETIONS)
    async def chat_completions(request: Request) -> Response:
        """Answer a chat; the model's chat template is applied. With `stream` the answer is server-sent events."""
        return await answer(request, parse_chat, "chatcmpl")


def _add_models(app: FastAPI, router: Serving) -> None:
    started = int(time.time())

    def model() -> Model:
        info = router.model_info()
        longest = info.max_model_len
        return Model(id=info.model, object="model", created=started, owned_by="paceline", max_model_len=longest)

    @app.get("/v1/models", **openapi.MODELS)
    async def models() -> Response:
        """List what is served, which is one model."""
        return JSONResponse(Models(object="list", data=[model()]))

    @app.get("/v1/models/{name:path}", **openapi.MODEL)
    async def one_model(name: str) -> Response:
        """Describe one model, if it is the one that is served. A name may contain slashes."""
        served = model()
        if name != served["id"]:
            raise model_not_found(name, served["id"])
        return JSONResponse(served)


def _add_operations(app: FastAPI, router: Serving, metrics: Metrics) -> None:
    @app.get("/health", **openapi.HEALTH)
    async def health() -> Response:
        """Say whether requests can be served now: 200 if so, 503 if not. Load balancers ask this."""
        ready, info = router.ready(), router.model_info()
        roles = [node.role for node in info.nodes]
        nodes = NodeCounts(prefill=roles.count("prefill"), decode=roles.count("decode"))
        body = Health(status="ok" if ready else "no decode node is ready", model=info.model, nodes=nodes)
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/ping", **openapi.PING)
    @app.post("/ping", **openapi.PING)
    async def ping() -> Response:
        """Say by the status alone what `/health` says: 200 or 503. Some platforms ask this way."""
        return Response(status_code=200 if router.ready() else 503)

    @app.get("/version", **openapi.VERSION)
    async def version_() -> Response:
        """Tell the version of Paceline."""
        return JSONResponse(Version(version=version("paceline")))

    @app.get("/metrics", **openapi.METRICS)
    async def metrics_text() -> Response:
        """Every metric of the router and of the nodes, in Prometheus' text format."""
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})


def _add_document(app: FastAPI) -> None:
    described = openapi.document(app)

    @app.get(openapi.PATH, include_in_schema=False)
    async def document() -> Response:
        return JSONResponse(described)


async def _read_object(request: Request) -> dict[str, Any]:
    """The object that the body is. Raises InvalidRequest, and what ``_read_body`` raises."""
    return parse_object(await _read_body(request))


async def _read_body(request: Request) -> bytes:
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
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_DISCARDED_BYTES:
                    break
                if size > MAX_BODY_BYTES:
                    body.clear()  # read on all the same: a client that is cut off while it sends misses the answer
                else:
                    body += part
    except TimeoutError:
        raise HttpProblem(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    if size > MAX_BODY_BYTES:
        raise too_large
    return bytes(body)


class _ClientGone(Exception):
    """The client takes nothing more."""


class _Reply(Response):
    """Generates while it is sent, so that whatever ends the sending ends the generation."""

    def __init__(self, router: Serving, request: ApiRequest, answer: Answer, prompts: tuple[AskedPrompt, ...]) -> None:
        super().__init__()
        self._router, self._request, self._answer, self._prompts = router, request, answer, prompts
        self._started = False
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        await _while_connected(receive, self._reply())

    async def _reply(self) -> None:
        try:
            async with aclosing(generate_all(self._router, self._prompts, self._answer.planned)) as chunks:
                await (self._stream(chunks) if self._request.stream else self._whole(chunks))
        except _ClientGone:
            log.info("%s: the client is gone", self._request.generation.request_id)
        except Exception as error:
            await self._fail(self._request.renamed(error) if isinstance(error, InvalidRequest) else error)

    async def _whole(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        async for chunk in chunks:
            self._answer.take(chunk)
        await self._send_all(200, self._answer.body(), {})

    async def _stream(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        async for chunk in chunks:
            if not self._started:
                await self._start(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})
            for event in self._answer.events(chunk):
                await self._write(f"data: {dumps(event)}\n\n")
        await self._write("data: [DONE]\n\n")
        await self._write("", last=True)

    async def _fail(self, error: Exception) -> None:
        problem = problem_for(error)
        try:
            if self._started:
                await self._write(f"event: error\ndata: {problem.dumps()}\n\n", last=True)
            else:
                await self._send_all(problem.status, problem.body(), problem.headers)
        except _ClientGone:
            log.info("%s: the client is gone", self._request.generation.request_id)

    # -- sending -----------------------------------------------------------------------------------------------

    async def _send_all(self, status: int, body: Mapping[str, Any], headers: dict[str, str]) -> None:
        data = dumps(body)
        await self._start(status, {"content-type": JSON, "content-length": str(len(data)), **headers})
        await self._write(data, last=True)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        if self._request.ignored:
            headers = {**headers, IGNORED: ", ".join(self._request.ignored)}
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, data: str, last: bool = False) -> None:
        await self._put({"type": "http.response.body", "body": data.encode("ascii"), "more_body": not last})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except (TimeoutError, OSError):
            raise _ClientGone from None


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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


def _refusal(problem: HttpProblem) -> Response:
    return Response(problem.dumps(), problem.status, problem.headers, JSON)
