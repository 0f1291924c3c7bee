"""The HTTP application's answers, and what it asks its router."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.contract.generation import Chat, ChatMessage
from paceline.request import SpeculationParams
from tests.support.fake_router import MODEL, FakeRouter
from tests.support.http_app import CHAT, CHATS, COMPLETION, COMPLETIONS, events

# -- answers -----------------------------------------------------------------------------------------------------


async def test_completion_body(client: httpx.AsyncClient, router: FakeRouter) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "model": MODEL, "seed": 3})
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["id"] == router.asked[0].request_id == response.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    ended = {"finish_reason": "stop", "stop_reason": None, "matched_stop": ord("u")}
    unasked = dict.fromkeys(("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"))
    assert body["choices"] == [{"index": 0, "text": "Hello you", **unasked, **ended}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
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
            {"token": "\ufffd", "logprob": -2.0, "bytes": [200]},  # half a character
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [201]},
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


# -- the rest ----------------------------------------------------------------------------------------------------


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [(model["id"], model["root"]) for model in listed["data"]] == [(MODEL, MODEL)]
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


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/health//", 404), ("GET", COMPLETIONS, 405)]
)
async def test_wrong_paths(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
