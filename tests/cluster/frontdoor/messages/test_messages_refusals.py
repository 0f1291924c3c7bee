"""What the Messages API does not offer is refused by its name, in Anthropic's shape, and asks no node."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.fake_router import FakeRouter

PATH = "/v1/messages"
GOOD: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


def turn(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: is missing"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    (turn({"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0]: must be a block"),
    (turn({"type": "document", "source": {}}), "messages[0].content[0]: must be a block"),
    (turn({"type": "text"}), "messages[0].content[0].text: is missing"),
    (turn({"type": "text", "text": "x", "extra": 1}), "messages[0].content[0].extra: is not a field"),
    (turn(RESULT), "messages[0].content[0].tool_use_id: is not the id of a call before it"),
    (turn({**RESULT, "content": [{"type": "image"}]}), "messages[0].content[0].content[0].type"),
    (turn(RESULT, "assistant"), "messages[0].content[0].type: 'tool_result' goes with the role 'user' alone"),
    (turn({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages[0].content[0].type: 'tool_use'"),
    (turn({"type": "tool_use", "id": "a", "name": "f", "input": "x"}, "assistant"), "messages[0].content[0].input"),
    (turn({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type: 'thinking'"),
    (turn({"type": "redacted_thinking", "data": "x"}, "assistant"), "messages[0].content[0]: must be a block"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is missing"),
    ({"tools": [TOOL] * 129}, "tools: must have at most 128 items"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: asks for a call, and there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name: is none of the tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is none of the tools"),
    ({"temperature": 1.5}, "temperature: must be at most 1"),
    ({"top_p": 0}, "top_p: must be above 0"),
    ({"top_k": -1}, "top_k: must be at least 0"),
    ({"stop_sequences": [""]}, "stop_sequences[0]: must not be empty"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: must have at most 16 items"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"output_config": {"effort": 1}}, "output_config.effort: must be a string"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is missing"),
    ({"container": "x"}, "container: is not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: is not supported"),
    ({"nonsense": 1}, "nonsense: is not a field"),
]


def error_of(response: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The words of an error in Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"].keys(), body["error"]["type"]) == ("error", {"type", "message"}, kind)
    return str(body["error"]["message"])


@pytest.mark.parametrize(("wrong", "words"), WRONG)
async def test_wrong_input_is_named_and_asks_no_node(
    client: httpx.AsyncClient, router: FakeRouter, wrong: dict[str, Any], words: str
) -> None:
    assert error_of(await client.post(PATH, json={**GOOD, **wrong}), 400).startswith(words)
    assert router.asked == []


async def test_errors_before_any_route_have_the_shape_too(client: httpx.AsyncClient) -> None:
    error_of(await client.post(PATH, content="{"), 400)
    error_of(await client.get(PATH), 405)
    error_of(await client.post(f"{PATH}/batches", json={}), 404, "not_found_error")
    error_of(await client.post(f"{PATH}/count_tokens", json={}), 400)
    error_of(await client.post(PATH, content="x", headers={"content-type": "text/plain"}), 415)
    assert "param" in (await client.post("/v1/messages_of_others", json={})).json()["error"]  # OpenAI's


async def test_neutral_and_ignored_fields_are_taken(client: httpx.AsyncClient, router: FakeRouter) -> None:
    body = {
        **GOOD, "metadata": {"user_id": "x"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "tools": [],
        "tool_choice": {"type": "auto"}, "output_config": {"effort": "high"}, "cache_control": {"type": "ephemeral"},
        "stop_sequences": [], "stream": False, "container": None, "mcp_servers": [], "inference_geo": "eu",
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "none"}
    assert (await client.post(f"{PATH}?beta=true", json=body, headers=headers)).status_code == 200
    assert router.asked[0].sampling.stop == ()


async def test_refusals_are_counted(client: httpx.AsyncClient) -> None:
    for path in (PATH, f"{PATH}/count_tokens", "/v1/responses"):
        await client.post(path, json={"nonsense": 1})
    line = 'paceline_requests_total{status="InvalidRequest"} 3.0'
    assert line in (await client.get("/metrics")).text
