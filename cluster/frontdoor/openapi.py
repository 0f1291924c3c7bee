"""The OpenAPI document of the HTTP surface: ``GET /openapi.json``.

Paths and methods are those of the application's routes. Request bodies are the models that read them
(`cluster.frontdoor.openai_requests`), answers are the shapes of `cluster.frontdoor.openai_answers`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema

from cluster.frontdoor.json_models import JsonObject
from cluster.frontdoor.messages.requests import CountTokensRequest, MessageRequest
from cluster.frontdoor.openai_answers import (
    Chat,
    Completion,
    Detokenized,
    Error,
    Health,
    Model,
    Models,
    Tokens,
    Version,
)
from cluster.frontdoor.openai_requests import ChatRequest, CompletionRequest
from cluster.frontdoor.openai_tokens import DetokenizeRequest, TokenizeRequest
from cluster.frontdoor.responses.requests import ResponseRequest
from cluster.frontdoor.route_docs import OTHER_ERRORS, REF, TEXT, Route, generation_route, plain_route

PATH = "/openapi.json"
TITLE = "Paceline"

BODIES: tuple[type[JsonObject], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    MessageRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)

_NOT_SERVED = {"description": "No model of this name is served.", "model": Error}

COMPLETIONS = generation_route(CompletionRequest, Completion)
CHAT_COMPLETIONS = generation_route(ChatRequest, Chat)
MODELS: Route = {"responses": {200: {"description": "The models.", "model": Models}, **OTHER_ERRORS}}
MODEL: Route = {"responses": {200: {"description": "The model.", "model": Model}, 404: _NOT_SERVED, **OTHER_ERRORS}}
HEALTH: Route = {
    "responses": {
        200: {"description": "Requests can be served.", "model": Health},
        503: {"description": "No decode node is ready.", "model": Health},
        **OTHER_ERRORS,
    }
}
TOKENIZE = plain_route(TokenizeRequest, Tokens)
DETOKENIZE = plain_route(DetokenizeRequest, Detokenized)
VERSION: Route = {"responses": {200: {"description": "The version.", "model": Version}, **OTHER_ERRORS}}
PING: Route = {
    "response_class": Response,  # which has no body
    "responses": {
        200: {"description": "Requests can be served."},
        503: {"description": "No decode node is ready."},
        **OTHER_ERRORS,
    },
}
METRICS: Route = {"responses": {200: {"description": "The metrics.", "content": {"text/plain": TEXT}}, **OTHER_ERRORS}}


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of the application's routes."""
    made = get_openapi(title=TITLE, version=version("paceline"), routes=app.routes)
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    made["components"]["schemas"] |= bodies["$defs"]
    return made
