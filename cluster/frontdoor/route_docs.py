"""What the OpenAPI document says of a route: its body, its answer and its errors."""

from __future__ import annotations

from typing import Any

from cluster.frontdoor.json_models import JsonObject
from cluster.frontdoor.openai_answers import Error

REF = "#/components/schemas/{model}"
Route = dict[str, Any]  # what FastAPI is told of a route

TEXT = {"schema": {"type": "string"}}
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}, "required": True}
}
_GENERATION_ERRORS = {
    400: "The body is wrong; `param` names the field.",
    404: "The request names another model than the one that is served.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The content type is not `application/json`.",
    429: "The deployment has no room now. `Retry-After` says when to come back.",
    503: "No node can serve the request.",
    504: "The request took longer than it may.",
}


OTHER_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"description": "Any other error.", "model": Error}}


def generation_route(body: type[JsonObject], answer: type[Any], error: type[Any] = Error) -> Route:
    """A route that generates. With ``stream`` the answer is events: data lines, each a part of it."""
    # A reference, since the route has the model already: FastAPI takes 10 ms for each.
    wrong = {"application/json": {"schema": {"$ref": REF.format(model=error.__name__)}}}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": wrong} for status, text in _GENERATION_ERRORS.items()
    }
    errors[429]["headers"] = _RETRY_AFTER
    done = {"description": "The answer.", "model": answer, "content": {"text/event-stream": TEXT}}
    return {
        "responses": {200: done, **errors, "default": {"description": "Any other error.", "model": error}},
        "openapi_extra": _body(body),
    }


def plain_route(body: type[JsonObject], answer: type[Any]) -> Route:
    """A route that answers at once."""
    wrong = {400: {"description": _GENERATION_ERRORS[400], "model": Error}}
    return {
        "responses": {200: {"description": "The answer.", "model": answer}, **wrong, **OTHER_ERRORS},
        "openapi_extra": _body(body),
    }


def _body(model: type[JsonObject]) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
