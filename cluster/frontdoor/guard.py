"""What every HTTP route needs of its caller, asked before anything of the body is read."""

from __future__ import annotations

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.access.access import Access, Need, bearer
from cluster.access.caller import set_current
from cluster.frontdoor.http_errors import HttpProblem, dumps, problem_for
from cluster.frontdoor.http_exchange import JSON
from cluster.frontdoor.messages.errors import is_message_path, message_error
from paceline.errors import PacelineError

# Every route of the application: a test fails where one is missing.
NEEDS = {
    "/health": Need.OPEN,
    "/ping": Need.OPEN,
    "/version": Need.KEY,
    "/openapi.json": Need.KEY,
    "/metrics": Need.METRICS,
    "/v1/models": Need.KEY,
    "/v1/models/{name:path}": Need.KEY,
    "/v1/completions": Need.INFER,
    "/v1/chat/completions": Need.INFER,
    "/v1/messages": Need.INFER,
    "/v1/messages/count_tokens": Need.INFER,
    "/v1/responses": Need.INFER,
    "/v1/responses/{response_id}": Need.INFER,
    "/v1/responses/{response_id}/cancel": Need.INFER,
    "/v1/responses/{response_id}/input_items": Need.INFER,
    "/tokenize": Need.INFER,
    "/detokenize": Need.INFER,
}
_PATTERNS = [(compile_path(template)[0], template) for template in NEEDS]  # as routes match: a newline may end a path


class Guard:
    """Lets through whom ``access`` admits. ``open_metrics``: ``/metrics`` needs no key."""

    def __init__(self, app: ASGIApp, access: Access, open_metrics: bool) -> None:
        self._app, self._access, self._open_metrics = app, access, open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        template = path if path in NEEDS else next((name for regex, name in _PATTERNS if regex.match(path)), "")
        need = NEEDS.get(template, Need.KEY)  # of a path that is none, too
        if template == "/metrics" and self._open_metrics:
            need = Need.OPEN
        act = f"{scope['method']} {template or 'unknown path'}"
        peer = scope["client"][0] if scope.get("client") else ""
        try:
            caller = await self._access.admit(_sent(Headers(scope=scope), path), peer, act, need)
        except PacelineError as error:
            return await refusal(path, problem_for(error))(scope, receive, send)
        if caller is not None:
            set_current(caller)
        return await self._app(scope, receive, send)


def _sent(headers: Headers, path: str) -> str | None:
    """The key that was sent. Anthropic's clients have a header of their own for it."""
    own = headers.get("x-api-key") if is_message_path(path) else None
    return bearer(headers.get("authorization")) or own


def refusal(path: str, problem: HttpProblem) -> Response:
    """An error in the shape of the API that was asked."""
    body = dumps(message_error(problem)) if is_message_path(path) else problem.dumps()
    return Response(body, problem.status, problem.headers, JSON)
