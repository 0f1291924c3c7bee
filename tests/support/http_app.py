"""Requests to the HTTP application, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from cluster.frontdoor.http import create_app
from cluster.frontdoor.service import serve_grpc
from paceline.client import AsyncClient
from tests.support.scripted_nodes import Fleet

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
# Fields that say what the text must be; at most one of them may.
FORMATS = (
    *("response_format", "response_format.json_schema.schema"),
    *(f"structured_outputs.{way}" for way in ("json", "regex", "choice", "grammar", "json_object")),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("json_schema", "regex", "ebnf"),
)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@asynccontextmanager
async def surfaces(nodes: Fleet) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncClient]]:
    """The router over HTTP, in this process, and over gRPC by the SDK."""
    transport = httpx.ASGITransport(create_app(nodes.router, nodes.router.metrics))
    server = await serve_grpc(nodes.router, "127.0.0.1:0")
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://paceline") as client,
            AsyncClient(f"127.0.0.1:{server.port}") as sdk,
        ):
            yield client, sdk
    finally:
        await server.stop(0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of all events; the stream must end with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any] | bytes, status: int = 400) -> str:
    """Ask, be refused in OpenAI's shape; returns the field that is named."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = await client.post(path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return str(error["param"])
