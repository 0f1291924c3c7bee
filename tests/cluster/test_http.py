"""The HTTP application against a scripted router, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster import http as http_module
from cluster.http import create_app
from cluster.metrics import Metrics
from cluster.plan import Chat, ChatMessage
from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
)
from paceline.request import SpeculationParams
from support.fake_router import MODEL, FakeRouter

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(router: FakeRouter, metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(router, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        yield client


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


# -- answers -----------------------------------------------------------------------------------------------------


async def test_completion_body(client: httpx.AsyncClient, router: FakeRouter) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "model": MODEL, "seed": 3})
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["id"] == router.asked[0].request_id == response.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [{"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    extension = body["paceline"]
    assert extension["token_ids"] == [[ord(letter) for letter in "Hello you"]]
    assert extension["speculation"]["accepted_tokens"] == 6
    assert extension["speculation"]["acceptance_length"] == 3.0
    assert extension["timing"] == {"ttft_s": 0.1, "e2e_s": 0.5, "decode_tokens_per_s": 20.0}
    assert extension["nodes"] == {"prefill": "prefill-0", "decode": "decode-1"}
    assert extension["handoff"] == {"target_kv": 1000, "draft_kv": 100, "hidden": 10, "meta": 1}
    assert extension["seed"] == 3
    assert "choices" not in extension


async def test_chat_body_with_two_choices(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHATS, json={**CHAT, "n": 2})).json()
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello you", "refusal": None}
    assert [choice["message"] for choice in body["choices"]] == [message, message]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 5  # once
    assert body["usage"]["completion_tokens"] == 18
    assert len(body["paceline"]["token_ids"]) == 2
    assert [choice["seed"] for choice in body["paceline"]["choices"]] == [77, 78]


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    got = events(await client.post(CHATS, json={**CHAT, "stream": True, "n": 2}))
    first: dict[int, dict[str, str]] = {}
    for event in got:
        assert event["object"] == "chat.completion.chunk"
        assert "usage" not in event
        for choice in event["choices"]:
            first.setdefault(choice["index"], choice["delta"])
    assert first == {i: {"role": "assistant", "content": ""} for i in (0, 1)}
    for index in (0, 1):
        mine = [c for event in got for c in event["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello you"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
    assert ["paceline" in event for event in got] == [False] * (len(got) - 1) + [True]
    assert len(got[-1]["paceline"]["token_ids"]) == 2


async def test_completion_stream_with_usage(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    got = events(await client.post(COMPLETIONS, json=body))
    assert [event["usage"] for event in got[:-1]] == [None] * (len(got) - 1)
    assert "".join(event["choices"][0]["text"] for event in got[:-1]) == "Hello you"
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["total_tokens"] == 14
    assert got[-1]["paceline"]["token_ids"] == [[ord(letter) for letter in "Hello you"]]


async def test_a_round_without_text_sends_nothing(client: httpx.AsyncClient, router: FakeRouter) -> None:
    router.rounds = ["a", "", "b"]
    got = events(await client.post(COMPLETIONS, json={**COMPLETION, "stream": True}))
    assert [event["choices"][0]["text"] for event in got] == ["a", "b", ""]


async def test_streams_are_ascii(client: httpx.AsyncClient, router: FakeRouter) -> None:
    router.rounds = ["\u2028\u0085é"]
    response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": True})
    assert response.content.isascii()
    assert events(response)[0]["choices"][0]["text"] == "\u2028\u0085é"


async def test_completion_logprobs(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "logprobs": 3}
    whole = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == list("Hello you")
    assert whole["token_logprobs"] == [-0.25] * 9
    assert whole["text_offset"] == list(range(9))
    assert whole["top_logprobs"][0] == {"H": -0.25, "\ufffd": -2.0}  # tokens that read the same: the best
    got = events(await client.post(COMPLETIONS, json={**body, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in got[:-1]]
    assert {key: [item for part in parts for item in part[key]] for key in whole} == whole


async def test_completion_logprobs_of_zero_show_the_chosen_token(client: httpx.AsyncClient) -> None:
    body = (await client.post(COMPLETIONS, json={**COMPLETION, "logprobs": 0})).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"][1] == {"e": -0.25}


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 3}
    whole = (await client.post(CHATS, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in whole] == list("Hello you")
    assert whole[0] == {
        "token": "H",
        "logprob": -0.25,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.25, "bytes": [72]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": None},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": None},
        ],
    }
    got = events(await client.post(CHATS, json={**body, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in got]
    assert [item for part in parts if part for item in part["content"]] == whole


async def test_chat_logprobs_without_alternatives(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHATS, json={**CHAT, "logprobs": True})).json()
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


# -- what the router is asked ------------------------------------------------------------------------------------


async def test_every_field_reaches_the_router(client: httpx.AsyncClient, router: FakeRouter) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "seed": 2**53 + 1,
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 2,
    }
    lists = {"stop": ["x", "yz"], "stop_token_ids": [3, 4], "logit_bias": {"5": -100, "6": 1.5}}
    more = {"max_tokens": 99, "speculation": {"num_draft_tokens": 0, "tree_width": 2}, "cache_salt": "team-a"}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    response = await client.post(COMPLETIONS, json={"prompt": [1, 2, 3], **sampling, **lists, **more, **ignored})
    assert response.status_code == 200, response.text
    asked = router.asked[0]
    assert asked.prompt == (1, 2, 3)
    for name, value in sampling.items():
        assert getattr(asked.sampling, name) == value, name
    assert asked.sampling.stop == ("x", "yz")
    assert asked.sampling.stop_token_ids == (3, 4)
    assert asked.sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (asked.max_tokens, asked.tenant) == (99, "team-a")
    assert asked.speculation == SpeculationParams(0, 2)


async def test_defaults(client: httpx.AsyncClient, router: FakeRouter) -> None:
    await client.post(COMPLETIONS, json={**COMPLETION, "temperature": None, "stop": None, "top_k": -1})
    await client.post(CHATS, json=CHAT)
    completion, chat = router.asked
    assert completion.max_tokens == 16
    assert chat.max_tokens is None  # as far as it may go
    assert completion.sampling == chat.sampling
    assert completion.sampling.temperature == 1.0
    assert completion.sampling.top_logprobs is None
    assert completion.speculation == SpeculationParams()


@pytest.mark.parametrize("body", [{"prompt": ["hi"]}, {"prompt": "hi", "stop": "x", "best_of": 1, "echo": False}])
async def test_forms_of_one_prompt(client: httpx.AsyncClient, router: FakeRouter, body: dict[str, Any]) -> None:
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert router.asked[0].prompt == "hi"


async def test_chat_messages(client: httpx.AsyncClient, router: FakeRouter) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    earlier: dict[str, Any] = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "tool_calls": [],
        "annotations": [],
    }
    messages = [{"role": "developer", "content": "be brief"}, earlier, {"role": "user", "content": parts}]
    body = {"messages": messages, "max_completion_tokens": 5, "tools": [], "response_format": {"type": "text"}}
    assert (await client.post(CHATS, json=body)).status_code == 200
    asked = router.asked[0]
    expected = (("system", "be brief"), ("assistant", "ok"), ("user", "one two"))
    assert asked.prompt == Chat(tuple(ChatMessage(*turn) for turn in expected))
    assert asked.max_tokens == 5


# -- what is refused ---------------------------------------------------------------------------------------------

WRONG_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({**COMPLETION, "echo": True}, "echo"),
    ({**COMPLETION, "suffix": "x"}, "suffix"),
    ({**COMPLETION, "best_of": 2}, "best_of"),
    ({**COMPLETION, "nonsense": 1}, "nonsense"),
    ({**COMPLETION, "n\ud800": 1}, "n\ud800"),
    ({**COMPLETION, "model": 5}, "model"),
    ({**COMPLETION, "n": 0}, "n"),
    ({**COMPLETION, "n": 2.0}, "n"),
    ({**COMPLETION, "n": True}, "n"),
    ({**COMPLETION, "max_tokens": 0}, "max_tokens"),
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
]

WRONG_CHATS = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ({**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
    ({**CHAT, "best_of": 1}, "best_of"),
    ({**CHAT, "prompt": "hi"}, "prompt"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "logprobs": 2}, "logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
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
        (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "body"),
        (b'{"prompt": "hi"', "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b"[]", "body"),
        (b"", "body"),
        (b"[" * 100_000, "body"),
    ],
)
async def test_wrong_json(client: httpx.AsyncClient, router: FakeRouter, content: bytes, param: str) -> None:
    assert await refused(client, COMPLETIONS, content) == param
    assert router.asked == []


async def test_another_model(client: httpx.AsyncClient, router: FakeRouter) -> None:
    response = await client.post(CHATS, json={**CHAT, "model": "gpt"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert router.asked == []


async def test_a_body_that_is_too_large(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(http_module, "MAX_DISCARDED_BYTES", 300)
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
    monkeypatch.setattr(http_module, "BODY_TIMEOUT_S", 0.05)

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
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
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


# -- the rest ----------------------------------------------------------------------------------------------------


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health(client: httpx.AsyncClient, router: FakeRouter) -> None:
    healthy = await client.get("/health")
    assert (healthy.status_code, healthy.json()["nodes"]) == (200, {"prefill": 1, "decode": 2})
    router.alive = False
    ill = await client.get("/health")
    assert (ill.status_code, ill.json()["nodes"]) == (503, {"prefill": 1, "decode": 0})


async def test_metrics_count_what_is_refused_here(client: httpx.AsyncClient) -> None:
    await client.post(COMPLETIONS, content=b"?")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'paceline_requests_total{status="InvalidRequest"} 1.0' in response.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405)])
async def test_wrong_paths(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
