"""Several prompts in one request, and answers that tell of their prompt: the HTTP application over scripted nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.contract.generation import GenerationRequest
from cluster.frontdoor.http import create_app
from cluster.frontdoor.openai_prompts import text_offsets
from cluster.frontdoor.prompts import PROMPTS_AT_ONCE, AskedPrompt, generate_all
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams
from tests.support.http_app import CHATS, COMPLETIONS, events, refused
from tests.support.scripted_nodes import MAX_MODEL_LEN, Fleet, fleet, letters

PROMPTS = ["hello", "a", "some words", "héé!"]
LISTS = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    async with fleet(**options) as made:
        transport = httpx.ASGITransport(create_app(made.router, made.router.metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
            yield made, client
        await made.idle()


async def ask(client: httpx.AsyncClient, prompt: Any, **body: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json={"prompt": prompt, "seed": 5, "max_tokens": 7, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(got: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    texts, ends = [""] * count, [{"finish_reason": None}] * count
    logprobs: list[dict[str, list[Any]]] = [{name: [] for name in LISTS} for _ in range(count)]
    for choice in (choice for event in got for choice in event["choices"]):
        at = choice["index"]
        texts[at] += choice["text"]
        if choice["finish_reason"]:
            ends[at] = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        for name, values in (choice["logprobs"] or {}).items():
            logprobs[at][name] += values
    return [{"index": i, "text": texts[i], "logprobs": logprobs[i], **ends[i]} for i in range(count)]


# -- several prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_each_prompt_gets_what_it_gets_alone(n: int, stream: bool, as_ids: bool) -> None:
    prompts = [list(prompt.encode()) for prompt in PROMPTS] if as_ids else PROMPTS
    async with served(prefill=2, decode=2) as (_, client):
        alone = [await ask(client, prompt, n=n, logprobs=1, echo=True) for prompt in prompts]
        expected = [choice for answer in alone for choice in answer["choices"]]
        if stream:
            body = {"prompt": prompts, "seed": 5, "max_tokens": 7, "n": n, "logprobs": 1, "echo": True, "stream": True}
            usage = {"stream_options": {"include_usage": True}}
            got = events(await client.post(COMPLETIONS, json={**body, **usage}))
            choices, last = streamed(got, n * len(prompts)), got[-1]
        else:
            last = await ask(client, prompts, n=n, logprobs=1, echo=True)
            choices = last["choices"]
        assert [choice["index"] for choice in choices] == list(range(n * len(prompts)))
        assert [c["text"] for c in choices] == [c["text"] for c in expected]
        assert [c["logprobs"] for c in choices] == [c["logprobs"] for c in expected]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == sum(answer["usage"][name] for answer in alone)
        assert last["paceline"]["token_ids"] == [ids for answer in alone for ids in answer["paceline"]["token_ids"]]


async def test_at_most_so_many_run_at_once_and_each_has_an_id() -> None:
    async with served() as (made, client):
        gate = made.nodes["prefill-0"].script.gate = asyncio.Event()
        asking = asyncio.create_task(ask(client, ["x"] * 20))
        while made.nodes["prefill-0"].active < PROMPTS_AT_ONCE:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        at_once = made.nodes["prefill-0"].active
        gate.set()
        answer = await asking
        assert at_once == PROMPTS_AT_ONCE
        assert [choice["text"] for choice in answer["choices"]] == [letters(5, 1, 7)] * 20
        ids = {sequence.request_id for sequence in made.nodes["prefill-0"].sequences}
        assert ids == {answer["id"], *(f"{answer['id']}-{i}" for i in range(1, 20))}


async def test_a_wrong_prompt_is_named_before_any_runs() -> None:
    async with served() as (made, client):
        for prompt in (["x", "y" * MAX_MODEL_LEN], [[1], [300]], [[1], [5] * MAX_MODEL_LEN]):
            assert await refused(client, COMPLETIONS, {"prompt": prompt}) == "prompt[1]"
        assert await refused(client, COMPLETIONS, {"prompt": ["y" * MAX_MODEL_LEN]}) == "prompt"
        assert await refused(client, COMPLETIONS, {"prompt": ["x", "y"], "min_tokens": 99}) == "min_tokens"
        assert made.nodes["prefill-0"].sequences == []


async def test_more_values_than_an_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.frontdoor.prompts.MAX_PROMPT_VALUES", 24)
    async with served() as (made, client):
        asked: dict[str, Any] = {"prompt": ["abc", "abc"], "max_tokens": 0, "n": 2, "prompt_logprobs": 1}
        await ask(client, **asked)
        made.nodes["prefill-0"].sequences.clear()
        for more in ({"n": 3}, {"prompt_logprobs": 2}, {"prompt": ["abc", "abcd"]}, {"echo": True, "logprobs": 2}):
            assert await refused(client, COMPLETIONS, {**asked, **more}) == "prompt"
        await ask(client, **{**asked, "prompt": ["abc" * 9] * 9, "prompt_logprobs": None})
        assert made.nodes["prefill-0"].sequences == []


async def test_one_that_fails_ends_the_others() -> None:
    async with served(prefill=0) as (made, client):
        made.nodes["decode-0"].script.errors = [InvalidRequest("prompt", "is odd")]
        made.nodes["decode-0"].script.round_pause_s = 0.2
        param = await refused(client, COMPLETIONS, {"prompt": ["x"] * 6, "max_tokens": 100})
        assert param in [f"prompt[{i}]" for i in range(6)]
        await made.idle(2.0)  # to their ends they would take 7 seconds


async def test_closing_cancels_every_prompt() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.gate = asyncio.Event()
        request = GenerationRequest((1, 2, 3), SamplingParams(seed=1, n=2), 50)
        prompts = [AskedPrompt(request, (1, 2, 3))] * 5
        async with aclosing(generate_all(made.router, prompts, lambda number, plan: None)) as chunks:
            await anext(chunks)
            while made.nodes["decode-0"].active < 10:
                await asyncio.sleep(0.005)
        await made.idle(2.0)
        assert made.nodes["decode-0"].cancelled == 10


# -- the prompt ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(stream: bool, max_tokens: int) -> None:
    text = letters(5, 5, max_tokens)
    async with served() as (_, client):
        if stream:
            body = {"prompt": "hello", "seed": 5, "max_tokens": max_tokens, "echo": True, "stream": True}
            got = events(await client.post(COMPLETIONS, json=body))
            (choice,) = streamed(got, 1)
            assert got[0]["choices"][0]["text"] == "hello"
        else:
            (choice,) = (await ask(client, "hello", max_tokens=max_tokens, echo=True))["choices"]
            assert choice["logprobs"] is None
        assert (choice["text"], choice["finish_reason"]) == ("hello" + text, "length")


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_prompt_and_completion(stream: bool, max_tokens: int) -> None:
    text = letters(5, 4, max_tokens)
    async with served() as (_, client):
        asked = {"max_tokens": max_tokens, "echo": True, "logprobs": 1}
        if stream:
            body = {"prompt": "abcd", "seed": 5, **asked, "stream": True}
            (choice,) = streamed(events(await client.post(COMPLETIONS, json=body)), 1)
        else:
            answer = await ask(client, "abcd", **asked)
            (choice,) = answer["choices"]
            assert answer["usage"] == {
                "prompt_tokens": 4,
                "completion_tokens": max_tokens,
                "total_tokens": 4 + max_tokens,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
            }
        assert choice["text"] == "abcd" + text
        assert choice["logprobs"] == {
            "tokens": list("abcd" + text),
            "token_logprobs": [None, -1.0, -2.0, -3.0] + [-0.5] * max_tokens,
            "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}, {"d": -3.0}] + [{letter: -0.5} for letter in text],
            "text_offset": list(range(4 + max_tokens)),
        }


async def test_offsets_of_characters_of_several_tokens() -> None:
    async with served() as (_, client):
        (choice,) = (await ask(client, "aé€b", max_tokens=1, echo=True, logprobs=0))["choices"]
        assert choice["text"] == "aé€b" + letters(5, 7, 1)
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4]
        assert choice["logprobs"]["tokens"][1] == "\ufffd"


async def test_prompt_logprobs_in_vllms_shape() -> None:
    async with served() as (_, client):
        plain = await ask(client, "abc", max_tokens=2)
        answer = await ask(client, ["abc", "x"], max_tokens=2, prompt_logprobs=2)
        a, b = answer["choices"]
        assert a["prompt_logprobs"] == [
            None,
            {
                "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
                "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
            },
            {
                "99": {"logprob": -2.0, "rank": 1, "decoded_token": "c"},
                "100": {"logprob": -3.0, "rank": 2, "decoded_token": "d"},
            },
        ]
        assert b["prompt_logprobs"] == [None]
        assert (a["text"], a["logprobs"]) == (plain["choices"][0]["text"], None)
        none = (await ask(client, "abc", max_tokens=0, prompt_logprobs=0))["choices"][0]
        assert none["prompt_logprobs"][1] == {"98": {"logprob": -1.0, "rank": None, "decoded_token": "b"}}
        assert (none["text"], none["finish_reason"]) == ("", "length")


async def test_more_alternatives_for_one_shape_than_for_the_other() -> None:
    async with served() as (_, client):
        asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
        (choice,) = (await ask(client, "ab", **asked))["choices"]
        assert choice["logprobs"]["top_logprobs"][1] == {"b": -1.0}
        assert list(choice["prompt_logprobs"][1]) == ["98", "99", "100"]


async def test_a_chat_tells_of_its_prompt_as_a_whole() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 2, "prompt_logprobs": 0, "n": 2}
    async with served() as (_, client):
        answer = (await client.post(CHATS, json=body)).json()
        rendered = b"<user>hi<assistant>"
        assert len(answer["prompt_logprobs"]) == len(rendered)
        assert answer["prompt_logprobs"][0] is None
        assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(b)] for b in rendered[1:]]
        assert "prompt_logprobs" not in answer["choices"][0]
        nothing = (await client.post(CHATS, json={**body, "max_tokens": 0, "n": 1})).json()
        assert nothing["choices"][0]["message"]["content"] == ""
        assert nothing["prompt_logprobs"] == answer["prompt_logprobs"]


class Spaces:
    """As SentencePiece: a token begins with its space, and the first one of a text is dropped."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(["", " the", " cat", "s"][i] for i in ids).removeprefix(" ")


def test_offsets_where_a_text_loses_its_first_space() -> None:
    assert text_offsets((0, 1, 2, 3, 1), Spaces()) == [0, 0, 3, 7, 8]  # "the cats the"
