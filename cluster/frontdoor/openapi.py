"""The OpenAPI document of the HTTP surface: ``GET /openapi.json``.

Paths and methods are those of the application's routes. Request bodies are the models that read them
(`cluster.frontdoor.openai_requests`), answers are the shapes of `cluster.frontdoor.openai_answers`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cluster.frontdoor.json_models import JsonObject
from cluster.frontdoor.messages.answers import AnswerMessage, MessageError, TokenCount
from cluster.frontdoor.messages.requests import CountTokensRequest, MessageRequest
from cluster.frontdoor.openai_answers import Chat, Completion, Error, Health, Model, Models
from cluster.frontdoor.openai_requests import ChatRequest, CompletionRequest
from cluster.frontdoor.responses.answers import DeletedResponse, InputItems, Response
from cluster.frontdoor.responses.requests import ResponseRequest

PATH = "/openapi.json"
TITLE = "Paceline"
REF = "#/components/schemas/{model}"

BODIES: tuple[type[JsonObject], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    MessageRequest,
    CountTokensRequest,
)

Route = dict[str, Any]  # what FastAPI is told of a route

_TEXT = {"schema": {"type": "string"}}
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


_OTHERS: dict[int | str, dict[str, Any]] = {"default": {"description": "Any other error.", "model": Error}}


def _generation(body: type[JsonObject], answer: type[Any], error: type[Any] = Error) -> Route:
    """A route that generates. With ``stream`` the answer is events: data lines, each a part of it."""
    # A reference, since the route has the model already: FastAPI takes 10 ms for each.
    wrong = {"application/json": {"schema": {"$ref": REF.format(model=error.__name__)}}}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": wrong} for status, text in _GENERATION_ERRORS.items()
    }
    errors[429]["headers"] = _RETRY_AFTER
    done = {"description": "The answer.", "model": answer, "content": {"text/event-stream": _TEXT}}
    schema = {"$ref": REF.format(model=body.__name__)}
    return {
        "responses": {200: done, **errors, "default": {"description": "Any other error.", "model": error}},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


_NOT_SERVED = {"description": "No model of this name is served.", "model": Error}

COMPLETIONS = _generation(CompletionRequest, Completion)
CHAT_COMPLETIONS = _generation(ChatRequest, Chat)
MESSAGES = _generation(MessageRequest, AnswerMessage, MessageError)
COUNT_TOKENS = _generation(CountTokensRequest, TokenCount, MessageError)
RESPONSES = _generation(ResponseRequest, Response)
_NO_RESPONSE = {"description": "No answer of this id and tenant is here.", "model": Error}


def _of_response(answer: type[Any], text: str) -> Route:
    """A route that asks about an answer by its id."""
    wrong = {"description": "The query is wrong, or the answer's state does not allow it.", "model": Error}
    return {"responses": {200: {"description": text, "model": answer}, 400: wrong, 404: _NO_RESPONSE, **_OTHERS}}


RESPONSE = _of_response(Response, "The answer as far as it is made.")
DELETED_RESPONSE = _of_response(DeletedResponse, "It is kept no more.")
INPUT_ITEMS = _of_response(InputItems, "The items.")
MODELS: Route = {"responses": {200: {"description": "The models.", "model": Models}, **_OTHERS}}
MODEL: Route = {"responses": {200: {"description": "The model.", "model": Model}, 404: _NOT_SERVED, **_OTHERS}}
HEALTH: Route = {
    "responses": {
        200: {"description": "Requests can be served.", "model": Health},
        503: {"description": "No decode node is ready.", "model": Health},
        **_OTHERS,
    }
}
METRICS: Route = {"responses": {200: {"description": "The metrics.", "content": {"text/plain": _TEXT}}, **_OTHERS}}


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of the application's routes."""
    made = get_openapi(title=TITLE, version=version("paceline"), routes=app.routes)
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    made["components"]["schemas"] |= bodies["$defs"]
    return made
