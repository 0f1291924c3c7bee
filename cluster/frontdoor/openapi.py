"""The OpenAPI document of the HTTP surface: ``GET /openapi.json``.

Paths and methods are those of the application's routes, request bodies are the schemas of the kinds that read them
(`cluster.frontdoor.openai_fields`), and what an answer tells beyond OpenAI's shape comes from the data classes that
it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from cluster.frontdoor.json_kinds import Schema
from cluster.frontdoor.openai_fields import CHAT, COMPLETION
from paceline.results import HandoffBytes, ServedBy, SpeculationStats, Timing

PATH = "/openapi.json"
TITLE = "Paceline"


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _object(**properties: Schema) -> Schema:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_ID: Schema = {"type": "integer"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
_REASON: Schema = {"enum": ["stop", "length", "abort"]}


def _answer(what: str, **said: Schema) -> Schema:
    """A complete answer of the object ``what``, whose choices say ``said``."""
    return _object(
        id=_TEXT,
        object={"const": what},
        created=_COUNT,
        model=_TEXT,
        choices=_list(_object(index=_COUNT, **said, logprobs=_OBJECT_OR_NULL, finish_reason=_REASON)),
        usage=_object(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
        paceline=_ref("Details"),
    )


_DETAILS = {"speculation": SpeculationStats, "timing": Timing, "nodes": ServedBy, "handoff": HandoffBytes}
SCHEMAS: Mapping[str, Schema] = {
    "CompletionRequest": COMPLETION.schema,
    "ChatRequest": CHAT.schema,
    "Completion": _answer("text_completion", text=_TEXT),
    "Chat": _answer("chat.completion", message=_object(role={"const": "assistant"}, content=_TEXT)),
    "Details": _object(
        **{name: TypeAdapter(part).json_schema() for name, part in _DETAILS.items()},
        seed=_COUNT,
        token_ids=_list(_list(_ID)),
    ),
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT),
    "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Health": _object(status=_TEXT, model=_TEXT, nodes=_object(prefill=_COUNT, decode=_COUNT)),
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": _COUNT, "required": True}}


def _error(description: str, **more: Any) -> dict[str, Any]:
    return {"description": description, "content": _content(_ref("Error")), **more}


def _success(schema: Schema, **more: Schema) -> dict[str, Any]:
    return {"description": "As asked.", "content": {**_content(schema), **more}}


Responses = dict[int | str, dict[str, Any]]
_OTHERS: Responses = {"default": _error("Anything else.")}
_GENERATION: Responses = {
    400: _error("The body is wrong; param names the field."),
    404: _error("Another model than the one served was asked for."),
    408: _error("The body did not arrive."),
    413: _error("The body is too large."),
    429: _error("No room now.", headers=_RETRY_AFTER),
    503: _error("No node can serve it."),
    504: _error("It took too long."),
    **_OTHERS,
}


def _generation(body: str, answer: str) -> dict[str, Any]:
    events = {"text/event-stream": {"schema": _TEXT}}  # with "stream": data lines, each a part of the answer
    return {
        "responses": {200: _success(_ref(answer), **events), **_GENERATION},
        "openapi_extra": {"requestBody": {"required": True, "content": _content(_ref(body))}},
    }


# What the application's routes are told of their operations.
COMPLETIONS = _generation("CompletionRequest", "Completion")
CHAT_COMPLETIONS = _generation("ChatRequest", "Chat")
MODELS: dict[str, Any] = {"responses": {200: _success(_ref("Models")), **_OTHERS}}
MODEL: dict[str, Any] = {"responses": {200: _success(_ref("Model")), 404: _error("It is not served."), **_OTHERS}}
_HEALTH = _success(_ref("Health"))
HEALTH: dict[str, Any] = {
    "responses": {200: _HEALTH, 503: {**_HEALTH, "description": "No decode node is ready."}, **_OTHERS}
}
METRICS: dict[str, Any] = {
    "responses": {200: {"description": "For Prometheus.", "content": _content(_TEXT, "text/plain")}, **_OTHERS}
}


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of the application's routes."""
    made = get_openapi(title=TITLE, version=version("paceline"), routes=app.routes)
    made["components"] = {"schemas": SCHEMAS}
    return made
