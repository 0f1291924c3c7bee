"""OpenAI-compatible HTTP in front of the router.

A request: body read (bounded) -> parsed -> ``router.generate`` -> one body, or server-sent events. An error before the
first byte is a status, after it an ``error`` event. A client that goes away ends the generation at once.
`cluster.frontdoor.http_surface` is around all paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.access.access import Access
from cluster.frontdoor import openapi, resuming
from cluster.frontdoor.guard import Guard, refusal
from cluster.frontdoor.held_bodies import HeldBodies
from cluster.frontdoor.http_errors import HttpProblem, dumps, model_not_found, problem_for
from cluster.frontdoor.http_exchange import ClientGone, Sender, read_object, while_connected
from cluster.frontdoor.http_server import HttpServer, serve_http
from cluster.frontdoor.http_surface import IGNORED, SurfaceApp, methods_of, request_id
from cluster.frontdoor.http_tokens import add_tokens
from cluster.frontdoor.intake import check_model
from cluster.frontdoor.messages.routes import add_messages
from cluster.frontdoor.openai_answers import Health, Model, Models, NodeCounts, Version
from cluster.frontdoor.openai_parse import ApiRequest, parse_chat, parse_completion
from cluster.frontdoor.openai_stream import Answer
from cluster.frontdoor.prompts import AskedPrompt, generate_all, read_prompts
from cluster.frontdoor.responses.routes import add_responses
from cluster.frontdoor.serving import Serving
from cluster.routing.metrics import CONTENT_TYPE, Metrics
from cluster.routing.resume import UnknownGeneration
from paceline.errors import InvalidRequest, PacelineError
from paceline.results import Chunk

__all__ = ["HttpServer", "create_app", "serve_http"]

log = logging.getLogger(__name__)

Parser = Callable[[dict[str, Any], str], ApiRequest]


@dataclass(frozen=True)
class HttpOptions:
    """What the deployment says of its HTTP surface."""

    cors_origins: tuple[str, ...] = ()  # of web pages that may ask; ``*`` is any
    fingerprint: str = ""  # names what the text depends on besides the request
    resumable: bool = False  # the same request and seed make the same text, so streams may go on anywhere
    access: Access | None = None  # who may ask; None: everybody
    open_metrics: bool = False  # /metrics needs no key
    trouble: Callable[[], str] = lambda: ""  # what is wrong though requests are served
    bodies: HeldBodies | None = None  # has room for bodies; None: the application's own


def create_app(
    router: Serving, metrics: Metrics, options: HttpOptions = HttpOptions(), described: bool = False
) -> FastAPI:
    """The application. metrics: what ``/metrics`` shows; requests that do not reach the router are counted in it.
    described: its routes know the shapes of their answers, which is a second of work, for the OpenAPI document."""
    app = SurfaceApp(
        title=openapi.TITLE,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        origins=options.cors_origins,
        around=lambda inner: _guarded(inner, options),
    )
    if not described:
        app.router.route_class = _Undescribed
    app.state.bodies = options.bodies or HeldBodies()
    _add_generation(app, router, metrics, options)
    add_responses(app, router, metrics, options.resumable)
    add_messages(app, router, metrics, options.resumable)
    _add_models(app, router)
    add_tokens(app, router)
    _add_operations(app, router, metrics, options)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of the first route of the path alone
            headers = {"allow": ", ".join(methods_of(app, request.scope))}
        return refusal(request.url.path, HttpProblem(error.status_code, str(error.detail), headers=headers))

    async def on_error(request: Request, error: Exception) -> Response:
        return refusal(request.url.path, problem_for(error))

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(HttpProblem, on_error)
    app.add_exception_handler(PacelineError, on_error)
    app.add_exception_handler(Exception, on_error)
    _add_document(app, lambda: create_app(router, metrics, options, described=True))
    return app


def _guarded(app: ASGIApp, options: HttpOptions) -> ASGIApp:
    return app if options.access is None else Guard(app, options.access, options.open_metrics)


def _add_generation(app: FastAPI, router: Serving, metrics: Metrics, options: HttpOptions) -> None:
    async def answer(request: Request, parse: Parser, prefix: str) -> Response:
        try:
            parsed = await read_object(request, lambda body: parse(body, request_id(request.scope, prefix)))
            served = check_model(router, parsed.generation.model)
            resumable = options.resumable and resuming.can_resume(parsed)
            since = resuming.position_of(request, resumable)
            if since is not None:
                names = {**parsed.names, "resume": resuming.HEADER}
                parsed = replace(parsed, generation=since.rest_of(parsed.generation), names=names)
            parsed = replace(parsed, generation=replace(parsed.generation, keeps_told=resumable))
            prompts = await read_prompts(router, parsed)
        except (InvalidRequest, HttpProblem):
            metrics.request_refused(InvalidRequest.__name__)
            raise
        metrics.fields_ignored(parsed.ignored)
        told = Answer(parsed, served, router.tokenizer, prompts, options.fingerprint, resumable)
        return _Reply(router, parsed, told, prompts, over=since is not None and since.over)

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

    def all_names() -> list[Model]:
        info = router.model_info()
        longest = info.max_model_len
        return [
            Model(
                id=name,
                object="model",
                created=started,
                owned_by="paceline",
                root=info.model,
                max_model_len=longest,
            )
            for name in info.names
        ]

    @app.get("/v1/models", **openapi.MODELS)
    async def models() -> Response:
        """List what is served, which is one model, under each of its names."""
        return JSONResponse(Models(object="list", data=all_names()))

    @app.get("/v1/models/{name:path}", **openapi.MODEL)
    async def one_model(name: str) -> Response:
        """Describe one model, if it is the one that is served. A name may contain slashes."""
        named = {model["id"]: model for model in all_names()}
        if name not in named:
            raise model_not_found(name, tuple(named))
        return JSONResponse(named[name])


def _add_operations(app: FastAPI, router: Serving, metrics: Metrics, options: HttpOptions) -> None:
    @app.get("/health", **openapi.HEALTH)
    async def health() -> Response:
        """Say whether requests can be served now: 200 if so, 503 if not. Load balancers ask this."""
        ready, info = router.ready(), router.model_info()
        roles = [node.role for node in info.nodes]
        nodes = NodeCounts(prefill=roles.count("prefill"), decode=roles.count("decode"))
        body = Health(status="ok" if ready else "no decode node is ready", model=info.model, nodes=nodes)
        if trouble := options.trouble():
            body["trouble"] = trouble
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


class _Undescribed(APIRoute):
    """Answers, and leaves what is said of its answers alone."""

    def __init__(self, *arguments: Any, responses: object = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)


def _add_document(app: FastAPI, described: Callable[[], FastAPI]) -> None:
    written = cache(lambda: openapi.document(described()))

    @app.get(openapi.PATH, include_in_schema=False)
    async def document() -> Response:
        return JSONResponse(await asyncio.to_thread(written))


class _Reply(Response):
    """Generates while it is sent, so that whatever ends the sending ends the generation."""

    def __init__(
        self, router: Serving, request: ApiRequest, answer: Answer, prompts: tuple[AskedPrompt, ...], over: bool
    ) -> None:
        """over: the client of a stream has all but its end."""
        super().__init__()
        self._router, self._request, self._answer, self._prompts = router, request, answer, prompts
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = self._request.ignored
        sender = Sender(send, {IGNORED: ", ".join(ignored)} if ignored else {})
        await while_connected(receive, self._reply(sender))

    async def _reply(self, sender: Sender) -> None:
        try:
            prompts = () if self._over else self._prompts
            async with aclosing(generate_all(self._router, prompts, self._answer.planned)) as chunks:
                await (self._stream(chunks, sender) if self._request.stream else self._whole(chunks, sender))
        except ClientGone:
            log.info("%s: the client is gone", self._request.generation.request_id)
        except UnknownGeneration as error:
            await self._fail(resuming.not_the_same(error), sender)
        except Exception as error:
            await self._fail(self._request.renamed(error) if isinstance(error, InvalidRequest) else error, sender)

    async def _whole(self, chunks: AsyncGenerator[Chunk, None], sender: Sender) -> None:
        async for chunk in chunks:
            self._answer.take(chunk)
        await sender.whole(200, self._answer.body(), {})

    async def _stream(self, chunks: AsyncGenerator[Chunk, None], sender: Sender) -> None:
        async for chunk in chunks:
            if not sender.started:
                await sender.start_events()
            for event_id, event in self._answer.new_events(chunk):
                name = f"id: {event_id}\n" if event_id else ""
                await sender.write(f"{name}data: {dumps(event)}\n\n")
        if not sender.started:
            await sender.start_events()
        await sender.write("data: [DONE]\n\n")
        await sender.write("", last=True)

    async def _fail(self, error: Exception, sender: Sender) -> None:
        problem = problem_for(error)
        try:
            if sender.started:
                await sender.write(f"event: error\ndata: {problem.dumps()}\n\n", last=True)
            else:
                await sender.whole(problem.status, problem.body(), problem.headers)
        except ClientGone:
            log.info("%s: the client is gone", self._request.generation.request_id)
