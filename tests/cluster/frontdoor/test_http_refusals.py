"""What the HTTP application refuses, and how failures reach its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.contract.generation import MAX_MESSAGES
from cluster.frontdoor import http_exchange
from cluster.frontdoor.json_body import MAX_COMMAS, MAX_CONTAINERS, MAX_FRACTIONS, MAX_TEXTS
from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
)
from tests.support.fake_router import FakeRouter
from tests.support.http_app import CHAT, CHATS, COMPLETION, COMPLETIONS, refused

# -- what is refused ---------------------------------------------------------------------------------------------

WRONG_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a", "b" * 512]}, "prompt[1]"),
    ({"prompt": [[1], [2, 256]]}, "prompt[1]"),
    ({**COMPLETION, "prompt_logprobs": 21}, "prompt_logprobs"),
    ({**COMPLETION, "prompt_logprobs": -1}, "prompt_logprobs"),
    ({**COMPLETION, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({**COMPLETION, "echo": "yes"}, "echo"),
    ({**COMPLETION, "suffix": "x"}, "suffix"),
    ({**COMPLETION, "best_of": 2}, "best_of"),
    ({**COMPLETION, "nonsense": 1}, "nonsense"),
    ({**COMPLETION, "n\ud800": 1}, "n\ud800"),
    ({**COMPLETION, "model": 5}, "model"),
    ({**COMPLETION, "n": 0}, "n"),
    ({**COMPLETION, "n": 2.5}, "n"),
    ({**COMPLETION, "n": 129}, "n"),
    ({**COMPLETION, "length_penalty": True}, "length_penalty"),
    ({**COMPLETION, "use_beam_search": 0}, "use_beam_search"),
    ({**COMPLETION, "best_of": 1, "n": 2}, "best_of"),
    ({**COMPLETION, "stop": [""]}, "stop[0]"),
    ({**COMPLETION, "return_token_ids": 1}, "return_token_ids"),
    ({**COMPLETION, "add_special_tokens": False}, "add_special_tokens"),
    ({**COMPLETION, "skip_special_tokens": 0}, "skip_special_tokens"),
    ({**COMPLETION, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({**COMPLETION, "truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side"),
    ({**COMPLETION, "bad_words": ["x", ""]}, "bad_words[1]"),
    ({**COMPLETION, "bad_words": ["x"] * 65}, "bad_words"),
    ({**COMPLETION, "stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
    ({**COMPLETION, "n": True}, "n"),
    ({**COMPLETION, "max_tokens": -1}, "max_tokens"),
    ({**COMPLETION, "max_tokens": 10**400}, "max_tokens"),
    ({**COMPLETION, "temperature": "hot"}, "temperature"),
    ({**COMPLETION, "temperature": -1}, "temperature"),
    ({**COMPLETION, "temperature": 10**400}, "temperature"),
    ({**COMPLETION, "logprobs": 21}, "logprobs"),
    ({**COMPLETION, "logprobs": True}, "logprobs"),
    ({**COMPLETION, "seed": -1}, "seed"),
    ({**COMPLETION, "stop": [1]}, "stop[0]"),
    ({**COMPLETION, "stop": ["x"] * 17}, "stop"),
    ({**COMPLETION, "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({**COMPLETION, "logit_bias": [1]}, "logit_bias"),
    ({**COMPLETION, "logit_bias": {"a": 1}}, "logit_bias"),
    ({**COMPLETION, "logit_bias": {"1": "a"}}, "logit_bias.1"),
    ({**COMPLETION, "logit_bias": {"999": 1}}, "logit_bias"),
    ({**COMPLETION, "speculation": {"num_draft_tokens": -1}}, "speculation.num_draft_tokens"),
    ({**COMPLETION, "speculation": {"tree_width": 0}}, "speculation.tree_width"),
    ({**COMPLETION, "speculation": {"depth": 1}}, "speculation.depth"),
    ({**COMPLETION, "speculation": 3}, "speculation"),
    ({**COMPLETION, "stream": "yes"}, "stream"),
    ({**COMPLETION, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**COMPLETION, "stream": True, "temperature": -1}, "temperature"),
    ({**COMPLETION, "": 1}, "''"),
    ({**COMPLETION, "cache_salt": "x" * 257}, "cache_salt"),
    ({**COMPLETION, "cache_salt": "\ud800"}, "cache_salt"),
    ({**COMPLETION, "repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"prompt": [1] * 1000 + [-1]}, "prompt[1000]"),
    ({"prompt": []}, "prompt"),
]
WRONG_CHATS = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({**CHAT, "tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    (
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ({**CHAT, "tool_choice": "maybe"}, "tool_choice"),
    ({**CHAT, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({**CHAT, "function_call": {"name": "f"}}, "function_call"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ({**CHAT, "reasoning_effort": 2}, "reasoning_effort"),
    ({**CHAT, "best_of": 2}, "best_of"),
    ({**CHAT, "modalities": ["text", "audio"]}, "modalities"),
    ({**CHAT, "web_search_options": {}}, "web_search_options"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a", "name": "x" * 257}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": []}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix"),
    ({**CHAT, "prompt": "hi"}, "prompt"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "logprobs": 2}, "logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}, "messages"),
    ({"messages": [{"role": "user", "content": [{}] * (MAX_MESSAGES + 1)}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("body", "param"), WRONG_COMPLETIONS)
async def test_wrong_completions(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert await refused(client, COMPLETIONS, body) == param


@pytest.mark.parametrize(("body", "param"), WRONG_CHATS)
async def test_wrong_chats(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert await refused(client, CHATS, body) == param


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": "hi", "temperature": NaN}', "temperature"),
        (b'{"prompt": "hi", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "hi", "logit_bias": {"5": -Infinity}}', "logit_bias.5"),
        (b'{"prompt": [1, NaN]}', "prompt[1]"),
        (b'{"": NaN}', "''"),
        (b'{"' + b"k" * 10_000 + b'": {"a": [NaN]}}', "k" * 100 + ".a[0]"),
        (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "body"),
        (b'{"prompt": "hi"', "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b"[]", "body"),
        (b"", "body"),
        (b"[" * 100_000, "body"),
        (b'{"prompt": "hi", "metadata": [' + b"[]," * MAX_CONTAINERS + b"[]]}", "body"),
        (b'{"prompt": "hi", "metadata": "' + b"\\" * MAX_CONTAINERS + b"[" * MAX_CONTAINERS, "body"),
        (b'{"prompt": "hi", "structured_outputs": {"json": {"enum": [' + b"1," * MAX_COMMAS + b"1]}}}", "body"),
        (b'{"prompt": "hi", "metadata": {' + b'"a": "",' * (MAX_TEXTS // 2) + b'"a": ""}}', "body"),
        (b'{"prompt": "hi", "metadata": [' + b"1.5," * MAX_FRACTIONS + b"1.5]}", "body"),
        (b'{"prompt": "hi", "guided_json": {"enum": [' + b"1," * 30_000 + b"1]}}", "guided_json"),
    ],
)
async def test_wrong_json(client: httpx.AsyncClient, router: FakeRouter, content: bytes, param: str) -> None:
    assert await refused(client, COMPLETIONS, content) == param
    assert router.asked == []


async def test_what_a_text_spells_is_not_counted(client: httpx.AsyncClient, router: FakeRouter) -> None:
    text = '[{"\\' * MAX_CONTAINERS + '",' * MAX_COMMAS
    assert (await client.post(COMPLETIONS, json={"prompt": text})).status_code == 200
    assert router.asked[0].prompt == text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "\xff"])
async def test_another_content_type(client: httpx.AsyncClient, router: FakeRouter, kind: str) -> None:
    """A web page can make a browser send these anywhere."""
    headers = {b"content-type": kind.encode("latin-1")}
    response = await client.post(COMPLETIONS, content=json.dumps(COMPLETION), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["param"] == "content-type"
    assert router.asked == []
    headers = {b"content-type": b"Application/JSON; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=json.dumps(COMPLETION), headers=headers)).status_code == 200


async def test_another_model(client: httpx.AsyncClient, router: FakeRouter) -> None:
    response = await client.post(CHATS, json={**CHAT, "model": "gpt"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert router.asked == []


async def test_a_body_that_is_too_large(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(http_exchange, "MAX_DISCARDED_BYTES", 300)
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 50
            yield b" " * 50

    response = await client.post(COMPLETIONS, content=parts())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert read <= 400
    assert (await client.post(COMPLETIONS, content=b" " * 301)).status_code == 413
    assert (await client.post(COMPLETIONS, json=COMPLETION)).status_code == 200


async def test_a_body_that_does_not_arrive(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "BODY_TIMEOUT_S", 0.05)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    response = await client.post(COMPLETIONS, content=parts())
    assert response.status_code == 408


# -- failures ----------------------------------------------------------------------------------------------------

FAILURES = [
    (InvalidRequest("top_logprobs", "too many"), 400, "invalid_value"),
    (Overloaded("full", 2.4), 429, "overloaded"),
    (NodeUnavailable("no decode node"), 503, "node_unavailable"),
    (HandoffFailed("cut"), 503, "handoff_failed"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (PacelineError("odd"), 500, "internal_error"),
    (RuntimeError("secret"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_byte(
    client: httpx.AsyncClient, router: FakeRouter, error: Exception, status: int, code: str, stream: bool
) -> None:
    router.error = error
    response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    if status == 400:
        assert response.json()["error"]["param"] == "logprobs"


async def test_a_failure_mid_stream_is_an_error_event(client: httpx.AsyncClient, router: FakeRouter) -> None:
    router.error, router.error_after = NodeUnavailable("gone"), 2
    response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": True})
    assert response.status_code == 200
    name, data = response.text.split("\n\n")[-2].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "node_unavailable"
    assert "[DONE]" not in response.text


async def test_a_failure_midway_gives_no_half_answer(client: httpx.AsyncClient, router: FakeRouter) -> None:
    router.error, router.error_after = HandoffFailed("cut"), 2
    response = await client.post(COMPLETIONS, json=COMPLETION)
    assert response.status_code == 503
    assert "Hel" not in response.text
