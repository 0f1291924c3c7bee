"""Errors as Anthropic's API says them: ``{"type": "error", "error": {"type", "message"}}`` and a status."""

from __future__ import annotations

from cluster.frontdoor.http_errors import HttpProblem
from cluster.frontdoor.messages.answers import MessageError, MessageProblem

PATH = "/v1/messages"
# The kinds of error by status; a status that is not here is an api_error.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_message_path(path: str) -> bool:
    """Whether errors there are Anthropic's."""
    return path == PATH or path.startswith(f"{PATH}/")


def message_error(problem: HttpProblem) -> MessageError:
    """The body of an error."""
    kind = KINDS.get(problem.status, "api_error")
    return MessageError(type="error", error=MessageProblem(type=kind, message=problem.message))
