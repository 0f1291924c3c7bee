"""What the Responses API does not offer is refused by its name, and asks no node."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.contract.generation import Chat, ToolChoice
from paceline.errors import InvalidRequest
from tests.support.fake_router import FakeRouter
from tests.support.http_app import refused

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call_output", "call_id": "no", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter", "container": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"temperature": 100.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "background"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"nonsense": 1}, "nonsense"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG)
async def test_wrong_input_is_named_and_asks_no_node(
    client: httpx.AsyncClient, router: FakeRouter, wrong: dict[str, Any], param: str
) -> None:
    assert await refused(client, PATH, {"input": "hi", **wrong}) == param
    assert router.asked == []


async def test_neutral_and_ignored_fields_are_taken(client: httpx.AsyncClient, router: FakeRouter) -> None:
    body: dict[str, Any] = {
        "input": "hi", "truncation": "disabled", "include": [], "top_logprobs": 0, "tools": [], "tool_choice": "auto",
        "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"format": {"type": "text"}},
        "service_tier": "flex", "prompt_cache_key": "x", "max_tool_calls": 3, "safety_identifier": "x", "user": "me",
        "stream": False, "background": False, "conversation": None,
    }  # fmt: skip
    assert (await client.post(PATH, json=body)).status_code == 200
    assert isinstance(router.asked[0].prompt, Chat)
    assert router.asked[0].prompt.tool_choice is ToolChoice.AUTO
    assert router.asked[0].sampling.grammar is None


async def test_the_routers_own_words_name_the_bodys_fields(client: httpx.AsyncClient, router: FakeRouter) -> None:
    """It knows a chat's messages and max_tokens; the body calls them otherwise."""
    names = {
        "messages": "input",
        "messages[3].content": "input",
        "max_tokens": "max_output_tokens",
        "tools[0]": "tools[0]",
    }
    for field, here in names.items():
        router.error = InvalidRequest(field, "is wrong")
        assert await refused(client, PATH, {"input": "hi"}) == here
        assert await refused(client, PATH, {"input": "hi", "background": True}) == here


async def test_a_lone_surrogate_breaks_nothing(client: httpx.AsyncClient) -> None:
    body = '{"input": [{"role": "user", "content": "hi", "id": "\\ud800"}], "metadata": {"\\ud800": "x"}}'
    made = await client.post(PATH, content=body)
    assert made.status_code == 200
    for path in ("", "/input_items"):
        assert (await client.get(f"{PATH}/{made.json()['id']}{path}")).status_code == 200
    for wrong in (
        '{"input": "\\ud800"}',
        '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": "\\ud800"}}]}',
    ):
        assert (await client.post(PATH, content=wrong)).status_code == 400
