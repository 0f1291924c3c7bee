"""The OpenAPI document says what the HTTP surface takes and answers, no more and no less."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from cluster.frontdoor import openapi
from cluster.frontdoor.http import create_app
from cluster.frontdoor.json_body import parse_object
from cluster.frontdoor.json_models import JsonObject, read
from cluster.frontdoor.messages.requests import CountTokensRequest, MessageRequest
from cluster.frontdoor.openai_parse import parse_chat, parse_completion
from cluster.frontdoor.responses.requests import ResponseRequest
from cluster.routing.metrics import Metrics
from paceline.errors import InvalidRequest
from paceline.request import RANGES
from tests.fuzz.schema_values import allowed, inlined, wrong
from tests.support.fake_router import FakeRouter
from tests.support.http_app import CHAT as GOOD_CHAT
from tests.support.http_app import CHATS, COMPLETIONS, FORMATS
from tests.support.http_app import COMPLETION as GOOD_COMPLETION

Parse = Callable[[dict[str, Any], str], object]


def _reader(model: type[JsonObject]) -> Parse:
    """What fields say by themselves: what they mean together has tests of its own."""
    return lambda body, _: read(model, body)


# What fields mean together, no schema says.
TOGETHER = re.compile(
    r"|best_of|stream_options|max_tokens|top_logprobs|background|continue_final_message|messages\[\d+\]\.content|"
    + "|".join(FORMATS)
)
BODIES: list[tuple[Parse, str]] = [
    (parse_completion, "CompletionRequest"),
    (parse_chat, "ChatRequest"),
    *((_reader(model), model.__name__) for model in (ResponseRequest, MessageRequest, CountTokensRequest)),
]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GOOD_MESSAGE: dict[str, Any] = {"max_tokens": 5, "messages": GOOD_CHAT["messages"]}
GOOD = {**GOOD_CHAT, **GOOD_COMPLETION, **GOOD_MESSAGE, "input": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi.document(create_app(FakeRouter(), Metrics(), described=True))


def schema_of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A schema of the document by itself."""
    made: dict[str, Any] = inlined({"$ref": f"#/components/schemas/{name}"}, document["components"])
    return made


def refusal(parse: Parse, body: Any) -> str:
    """The field that the parser refuses; empty when it takes the body."""
    try:
        parse(parse_object(json.dumps(body).encode()), "id")
    except InvalidRequest as error:
        return error.field
    return ""


def _is_text(body: Any) -> bool:
    """Half a surrogate pair is none, which a schema cannot say."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize(("parse", "name"), BODIES)
@pytest.mark.parametrize("make", [allowed, wrong])
def test_the_parser_takes_what_the_schema_allows(
    document: dict[str, Any], parse: Parse, name: str, make: Callable[..., Any]
) -> None:
    schema = schema_of(document, name)
    check, rng, seen = Draft202012Validator(schema), random.Random(7), Counter[bool]()
    for _ in range(400):
        body = make(rng, schema)
        if not _is_text(body):
            continue
        field, fits = refusal(parse, body), check.is_valid(body)
        assert TOGETHER.fullmatch(field) if fits else field, (field, body)
        seen[fits] += 1
    assert seen[True] == 400 if make is allowed else seen[False] > 200


@pytest.mark.parametrize(("parse", "body"), BODIES)
def test_every_field_is_documented(document: dict[str, Any], parse: Parse, body: str) -> None:
    """Each is taken with a value of its schema, and one that is not in the document is refused by its name."""
    schema = schema_of(document, body)
    required = {name: GOOD[name] for name in schema["required"]}
    needs = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "best_of": {}}
    # Values that go together: a turn without calls has a text.
    exact = {"best_of": 1, "structured_outputs": {"regex": "a"}, "messages": GOOD_CHAT["messages"]}
    for name, field in schema["properties"].items():
        value = exact.get(name, allowed(random.Random(1), field))
        more = needs.get(name, {}) if "n" in schema["properties"] else {}
        assert refusal(parse, {**required, **more, name: value}) == "", name
    assert refusal(parse, {**required, "grammar": "x"}) == "grammar"
    assert refusal(parse, {**required, "": "x"}) == "''"


def test_ranges_are_those_of_the_library(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    for name in RANGES.keys() - {"top_k", "top_logprobs"}:
        (schema, null) = fields[name]["anyOf"]
        assert (schema["minimum"], schema["maximum"], null) == (*RANGES[name], {"type": "null"}), name


def test_paths_are_those_that_are_served(document: dict[str, Any]) -> None:
    operations = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert operations == {
        *((path, "post") for path in (COMPLETIONS, CHATS, "/tokenize", "/detokenize", "/ping")),
        *((path, "post") for path in (RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens")),
        *((f"{RESPONSES}/{{response_id}}{more}", "get") for more in ("", "/input_items")),
        (f"{RESPONSES}/{{response_id}}/cancel", "post"),
        (f"{RESPONSES}/{{response_id}}", "delete"),
        *((path, "get") for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/ping", "/version")),
    }
    assert document["openapi"].startswith("3.1")
    Draft202012Validator.check_schema(document["components"]["schemas"]["ChatRequest"])


async def test_it_is_served(client: httpx.AsyncClient, document: dict[str, Any]) -> None:
    assert (await client.get("/openapi.json")).json() == json.loads(json.dumps(document))


async def test_answers_are_as_the_document_says(
    client: httpx.AsyncClient, router: FakeRouter, document: dict[str, Any]
) -> None:
    """Down to the last property: one that the data classes gain is in the document too."""

    def check(name: str, response: httpx.Response) -> None:
        Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]}).validate(
            response.json()
        )

    for path, body, name in ((COMPLETIONS, GOOD_COMPLETION, "Completion"), (CHATS, GOOD_CHAT, "Chat")):
        for more in ({}, {"return_token_ids": True}, {"n": 2, "logprobs": 2 if name == "Completion" else True}):
            check(name, await client.post(path, json={**body, **more}))
    details = (await client.post(COMPLETIONS, json=GOOD_COMPLETION)).json()["paceline"]
    for part in ("speculation", "timing", "nodes", "handoff"):
        schema = schema_of(document, "Details")["properties"][part]
        assert details[part].keys() == schema["properties"].keys(), part
    check("Models", await client.get("/v1/models"))
    check("Health", await client.get("/health"))
    check("Version", await client.get("/version"))
    check("Tokens", await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}))
    check("Detokenized", await client.post("/detokenize", json={"tokens": [104, 105]}))
    made = await client.post(RESPONSES, json={"input": "hi", "tools": [TOOL], "metadata": {"a": "b"}})
    check("Response", made)
    check("Response", await client.get(f"{RESPONSES}/{made.json()['id']}"))
    check("InputItems", await client.get(f"{RESPONSES}/{made.json()['id']}/input_items"))
    check("DeletedResponse", await client.delete(f"{RESPONSES}/{made.json()['id']}"))
    check("AnswerMessage", await client.post(MESSAGES, json=GOOD_MESSAGE))
    check("TokenCount", await client.post(f"{MESSAGES}/count_tokens", json={"messages": GOOD_MESSAGE["messages"]}))
    check("MessageError", await client.post(MESSAGES, json={}))
    for response in (await client.post(CHATS, json={}), await client.get(CHATS), await client.get("/v1/models/none")):
        assert response.status_code >= 400
        check("Error", response)
