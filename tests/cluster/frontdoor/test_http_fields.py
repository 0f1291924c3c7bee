"""What clients of OpenAI, vLLM and SGLang send and expect of the two endpoints that generate."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from cluster.contract.generation import MAX_MESSAGES
from cluster.frontdoor.http import HttpOptions, create_app
from cluster.frontdoor.openai_fields import IgnoredFields, RefusedChatFields, RefusedFields
from cluster.frontdoor.openai_parse import parse_chat, parse_completion
from cluster.routing.metrics import Metrics
from tests.support.fake_router import PROMPT_IDS, FakeRouter
from tests.support.http_app import CHAT, CHATS, COMPLETION, COMPLETIONS, events

BOTH: list[tuple[str, dict[str, Any]]] = [(COMPLETIONS, COMPLETION), (CHATS, CHAT)]
NEUTRAL: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "best_of": 1,
    "n": 1,
    "logit_bias": {},
    "bad_words": [],
    "stop": [],
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "no_stop_trim": False,
    "detokenize": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "vllm_xargs": {},
    "thinking_token_budget": -1,
    "return_hidden_states": False,
    "temperature": None,
}
NEUTRAL_CHAT = {
    "audio": None,
    "modalities": ["text"],
    "verbosity": "medium",
    "add_special_tokens": False,
    "documents": [],
    "separate_reasoning": True,
}


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_neutral_values_change_nothing(
    client: httpx.AsyncClient, router: FakeRouter, path: str, body: dict[str, Any]
) -> None:
    more = NEUTRAL_CHAT if path == CHATS else {"suffix": "", "add_special_tokens": True, "echo": False}
    for fields in ({}, {**NEUTRAL, **more}):
        response = await client.post(path, json={**body, **fields})
        assert response.status_code == 200, response.text
        assert "x-paceline-ignored" not in response.headers
    plain, neutral = router.asked
    assert (plain.prompt, plain.sampling, plain.max_tokens) == (neutral.prompt, neutral.sampling, neutral.max_tokens)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_named(
    client: httpx.AsyncClient, metrics: Metrics, path: str, body: dict[str, Any], stream: bool
) -> None:
    fields = {name: {"a": [1, "b"]} for name in IgnoredFields.model_fields}
    response = await client.post(path, json={**body, **fields, "user": None, "stream": stream})
    assert response.status_code == 200, response.text
    named = sorted(fields.keys() - {"user"})  # null is no field
    assert response.headers["x-paceline-ignored"] == ", ".join(named)
    await client.post(path, json={**body, "metadata": {}})
    counted = metrics.render().decode()
    assert 'paceline_ignored_fields_total{field="metadata"} 2.0' in counted
    assert 'paceline_ignored_fields_total{field="rid"} 1.0' in counted
    assert 'field="user"' not in counted


async def test_ignored_fields_of_messages_are_named_once(client: httpx.AsyncClient, router: FakeRouter) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    turn = {"role": "assistant", "content": [part, part], "provider_specific_fields": {}, "annotations": [{}]}
    told = {"role": "user", "content": [{"type": "input_text", "text": "b"}]}
    body = {"messages": [turn, turn, told], "stream": True, "stream_options": {"include_obfuscation": False}}
    response = await client.post(CHATS, json=body)
    assert response.headers["x-paceline-ignored"].split(", ") == [
        "messages[].annotations",
        "messages[].content[].cache_control",
        "messages[].provider_specific_fields",
        "stream_options.include_obfuscation",
    ]
    prompt = router.asked[0].prompt
    assert not isinstance(prompt, str | tuple)
    assert [turn.content for turn in prompt.messages] == ["aa", "aa", "b"]


@pytest.mark.parametrize("model", [RefusedFields, RefusedChatFields])
def test_what_is_refused_has_no_other_meaning(model: type[RefusedFields]) -> None:
    """A field that is both ignored and refused, or offered and refused, would have one of them by accident."""
    own = set(model.__annotations__)
    assert not own & IgnoredFields.model_fields.keys()
    assert not {name for name, field in model.model_fields.items() if field.default is not None}


async def test_names_and_thoughts_of_messages(client: httpx.AsyncClient, router: FakeRouter) -> None:
    messages = [
        {"role": "user", "content": "a", "name": "Ada"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": "c", "reasoning": "so"},
    ]
    assert (await client.post(CHATS, json={"messages": messages})).status_code == 200
    prompt = router.asked[0].prompt
    assert not isinstance(prompt, str | tuple)
    assert [(turn.name, turn.reasoning) for turn in prompt.messages] == [("Ada", ""), ("", "hm"), ("", "so")]


@pytest.mark.parametrize("number", [b"3.0", b"3", b"0.3e1", b"30E-1"])
async def test_a_whole_number_is_an_integer(client: httpx.AsyncClient, router: FakeRouter, number: bytes) -> None:
    body = b'{"prompt": [%b, 4.0], "max_tokens": %b, "n": %b, "temperature": %b, "speculation": {"tree_width": %b}}'
    response = await client.post(COMPLETIONS, content=body.replace(b"%b", number))
    assert response.status_code == 200, response.text
    asked = router.asked[0]
    assert isinstance(asked.prompt, tuple)
    assert (asked.prompt, asked.max_tokens, asked.sampling.n) == ((3, 4), 3, 3)
    assert [type(token_id) for token_id in asked.prompt] == [int, int]
    assert (asked.sampling.temperature, asked.speculation.tree_width) == (3.0, 3)


async def test_nothing_among_stop_texts(client: httpx.AsyncClient, router: FakeRouter) -> None:
    assert (await client.post(COMPLETIONS, json={**COMPLETION, "stop": [None, "a", None]})).status_code == 200
    assert router.asked[0].sampling.stop == ("a",)


async def test_a_hundred_and_twenty_eight_choices(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHATS, json={**CHAT, "n": 128, "best_of": 128})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(128))
    assert body["usage"]["completion_tokens"] == 128 * 9


# -- streams and answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_continuous_usage(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = events(await client.post(path, json={**body, "n": 2, "stream": True, "stream_options": options}))
    usages = [event["usage"] for event in got]
    assert all(usage["prompt_tokens"] == len(PROMPT_IDS) for usage in usages)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    rounds = 6  # three of two choices
    assert len(set(counts)) == rounds + (path == CHATS)  # the role comes before any token
    assert (counts[0] == 0) == (path == CHATS)
    assert counts[-1] == 18
    assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_continuous_usage_goes_with_usage(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in event for event in events(await client.post(COMPLETIONS, json=body)))


async def test_token_ids_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    body = (await client.post(COMPLETIONS, json={**COMPLETION, "return_token_ids": True})).json()
    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(b"Hello you"), list(PROMPT_IDS))
    chat = (await client.post(CHATS, json={**CHAT, "return_token_ids": True})).json()
    assert (chat["choices"][0]["token_ids"], chat["prompt_token_ids"]) == (list(b"Hello you"), list(PROMPT_IDS))
    plain = (await client.post(CHATS, json=CHAT)).json()
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"], plain["prompt_logprobs"]) == (None,) * 3
    (plain,) = (await client.post(COMPLETIONS, json=COMPLETION)).json()["choices"]
    assert (plain["prompt_token_ids"], plain["token_ids"], plain["prompt_logprobs"]) == (None,) * 3


async def test_token_ids_of_a_stream(client: httpx.AsyncClient, router: FakeRouter) -> None:
    """Each event has those since the one before, the first one the prompt's too."""
    router.rounds = ["He", "llo"]
    for path, body in BOTH:
        got = events(await client.post(path, json={**body, "return_token_ids": True, "stream": True}))
        told = [choice.get("token_ids", []) for event in got for choice in event["choices"]]
        assert [ids for ids in told if ids] == [list(b"He"), list(b"llo")]
        where = [event if path == CHATS else event["choices"][0] for event in got]
        assert [one.get("prompt_token_ids") for one in where] == [list(PROMPT_IDS)] + [None] * (len(got) - 1)


async def test_tokens_by_their_ids(client: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["token_id:72", "token_id:101"]
    assert logprobs["top_logprobs"][0] == {"token_id:72": -0.25, "token_id:200": -2.0}
    chat = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    first = (await client.post(CHATS, json=chat)).json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == ("token_id:72", [72], "token_id:72")


async def test_fingerprint_and_created(router: FakeRouter) -> None:
    before = int(time.time())
    app = create_app(router, Metrics(), HttpOptions(fingerprint="fp_1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        created = (await client.get("/v1/models")).json()["data"][0]["created"]
        assert before <= created <= time.time()
        for path, body in BOTH:
            assert (await client.post(path, json=body)).json()["system_fingerprint"] == "fp_1"
            got = events(await client.post(path, json={**body, "stream": True}))
            assert {event["system_fingerprint"] for event in got} == {"fp_1"}


def test_a_million_faults_are_refused_as_fast_as_one() -> None:
    """What bounds it is what is looked at, which these count."""
    faults: dict[str, Any] = {f"x{i}": 1 for i in range(100_000)}
    wrong = [{"role": "user", "content": "a", "nonsense": 1}] * MAX_MESSAGES
    for parse, body in ((parse_completion, {**COMPLETION, **faults}), (parse_chat, {"messages": wrong})):
        started = time.process_time()
        with pytest.raises(Exception, match="is not a field that is known here"):
            parse(body, "id")
        assert time.process_time() - started < 1.0
