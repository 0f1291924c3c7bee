"""What holds for every path of the HTTP surface, around the application.

Every answer, also an error, has ``x-request-id``: the client's own when it is one that logs can bear, else one that is
made. A path may end with a slash. HEAD asks what GET asks, and gets no body. Browsers of other origins are let in where
the deployment names them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontdoor.held_bodies import HeldBody
from cluster.frontdoor.http_errors import HttpProblem

REQUEST_ID = "x-request-id"
IGNORED = "x-paceline-ignored"
EXPOSED = (REQUEST_ID, IGNORED, "retry-after")  # headers of answers that scripts of other origins may read
_ID = re.compile(r"[A-Za-z0-9._:=/+@-]{1,128}")  # no '#', which numbers the choices of a request
_STATE = "paceline"  # key of what the surface keeps in a scope
_BODY = "body"


def request_id(scope: Mapping[str, Any], prefix: str) -> str:
    """The id of a request: the client's own, or one that begins with ``prefix``. The answer's header has it."""
    state: dict[str, Any] = scope[_STATE]
    return str(state.setdefault(REQUEST_ID, f"{prefix}-{uuid.uuid4().hex}"))


def hold_body(scope: Mapping[str, Any], body: HeldBody) -> None:
    """Have the body's bytes counted until the answer begins."""
    scope[_STATE][_BODY] = body


def methods_of(app: FastAPI, scope: Scope) -> list[str]:
    """The methods that the path of a request takes."""
    there = [route for route in app.routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", None) or ()})


class SurfaceApp(FastAPI):
    """An application behind the surface. ``origins``: those that browsers may ask from; ``*`` is any. ``around``: what
    is put around the application within the surface."""

    def __init__(
        self, *, origins: tuple[str, ...] = (), around: Callable[[ASGIApp], ASGIApp] = lambda app: app, **settings: Any
    ) -> None:
        self._origins, self._around = origins, around
        super().__init__(**settings)

    def build_middleware_stack(self) -> ASGIApp:
        """Overrides Starlette's, whose own handlers of errors would be outside of what is added to it."""
        app = self._around(super().build_middleware_stack())
        if self._origins:
            methods = ("GET", "HEAD", "POST", "DELETE")
            app = _Cors(app, self._origins, methods, allow_headers=("*",), expose_headers=EXPOSED)
        return _Surface(app)


class _Surface:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(REQUEST_ID, "")
        state: dict[str, Any] = {REQUEST_ID: given} if _ID.fullmatch(given) else {}
        path, head = scope["path"], scope["method"] == "HEAD"
        inner = {**scope, _STATE: state}
        if len(path) > 1 and path.endswith("/"):
            inner["path"] = path[:-1]
        if head:
            inner["method"] = "GET"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                _release(state)
                said = Headers(raw=message["headers"]).get(REQUEST_ID) or f"req-{uuid.uuid4().hex}"
                name = state.setdefault(REQUEST_ID, said)
                others = [header for header in message["headers"] if header[0] != REQUEST_ID.encode()]
                message = {**message, "headers": [*others, (REQUEST_ID.encode(), name.encode("ascii"))]}
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            return await self._app(inner, receive, named)
        finally:
            _release(state)


def _release(state: dict[str, Any]) -> None:
    held = state.pop(_BODY, None)
    if held is not None:
        held.release()


class _Cors(CORSMiddleware):
    """Starlette's, with errors in the shape of all others."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """See CORSMiddleware."""
        made = super().preflight_response(request_headers)
        if made.status_code < 400:
            return made
        problem = HttpProblem(made.status_code, bytes(made.body).decode(), code="cors")
        kept = {name: value for name, value in made.headers.items() if not name.startswith("content-")}
        return Response(problem.dumps(), problem.status, kept, "application/json")
