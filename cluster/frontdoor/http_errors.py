"""Errors as OpenAI's API says them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.frontdoor.openai_answers import Error, Problem
from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
    PermissionDenied,
    RequestCancelled,
    Unauthenticated,
)

log = logging.getLogger(__name__)


def dumps(value: Mapping[str, Any]) -> str:
    """JSON in ASCII: some clients take U+2028 for a line's end, and half a surrogate pair has no bytes in UTF-8."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


@dataclass
class HttpProblem(Exception):
    """An error with its place in HTTP."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> Error:
        """OpenAI's shape."""
        return Error(error=Problem(message=self.message, type=self.kind, param=self.param, code=self.code))

    def dumps(self) -> str:
        """The body in ASCII."""
        return dumps(self.body())


KINDS: tuple[tuple[type[PacelineError], int, str, str], ...] = (
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied, 403, "permission_error", "permission_denied"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (NodeUnavailable, 503, "service_unavailable_error", "node_unavailable"),
    (HandoffFailed, 503, "service_unavailable_error", "handoff_failed"),
    (RequestCancelled, 503, "service_unavailable_error", "cancelled"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
)


def problem_for(error: Exception) -> HttpProblem:
    """What to answer. An error that is none of Paceline's is a bug: it is logged, and its text stays here."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, InvalidRequest):
        return HttpProblem(400, str(error), param=error.field, code=error.code or "invalid_value")
    for kind, status, name, code in KINDS:
        if isinstance(error, kind):
            wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0  # nodes may be there again
            headers = {"retry-after": str(max(1, math.ceil(wait_s)))} if status in (429, 503) else {}
            if status == 401:
                headers["www-authenticate"] = "Bearer"
            return HttpProblem(status, str(error), name, code=code, headers=headers)
    log.error("a request failed", exc_info=error)
    message = str(error) if isinstance(error, PacelineError) else "internal error"
    return HttpProblem(500, message, "server_error", code="internal_error")


def check_model(asked: str | None, names: tuple[str, ...]) -> None:
    """Raise HttpProblem when another model is asked for than the one served, which has these ``names``."""
    if asked and asked not in names:
        raise model_not_found(asked, names)


def model_not_found(model: str, names: tuple[str, ...]) -> HttpProblem:
    """Another model than the one served was asked for."""
    message = f"The model {model[:256]!r} does not exist; {names[0]!r} is served here."
    return HttpProblem(404, message, param="model", code="model_not_found")
