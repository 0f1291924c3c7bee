"""What the text of an answer has, and what of a prompt is kept: over HTTP, and by the SDK over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.client import AsyncClient
from paceline.text.tokenizer import Tokenizer
from tests.cluster.routing.test_answer_parts import says
from tests.support.http_app import CHATS, COMPLETIONS, events, refused, surfaces
from tests.support.scripted_nodes import Fleet, fleet
from tests.support.tiny_chat import BOS, EOS, TEMPLATE, write_chat_tokenizer

EFFORT = "{% if reasoning_effort %}<s>effort {{ reasoning_effort }}</s>{% endif %}" + TEMPLATE
MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(folder: Path, template: str = TEMPLATE) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient, AsyncClient]]:
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(folder, template))
    async with fleet(tokenizer=tokenizer, max_model_len=200) as made, surfaces(made) as (client, sdk):
        yield made, client, sdk
        await made.idle()


async def text_of(client: httpx.AsyncClient, **body: Any) -> str:
    """The text of an answer, which a stream tells too; offsets of log-probabilities lie within it."""
    asked = {"prompt": "x", "seed": 5, "max_tokens": 30, "logprobs": 0, **body}
    response = await client.post(COMPLETIONS, json=asked)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    text: str = choice["text"]
    got = events(await client.post(COMPLETIONS, json=asked | {"stream": True}))
    assert "".join(choice["text"] for event in got for choice in event["choices"]) == text
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    return text


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_the_stop_text_is_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Mutant: the stop text of what was held back at the end is left out."""
    says(monkeypatch, "one. two")
    async with served(tmp_path) as (_, client, sdk):
        assert await text_of(client, stop=[". "]) == "one"
        assert await text_of(client, stop=[". "], **{name: True}) == "one. "
        assert await text_of(client, stop=["two", "two!"], **{name: True}) == "one. two"
        assert await text_of(client, stop_token_ids=[ord("t") - 0x21], **{name: True}) == "one. t"
        done = await sdk.generate("x", seed=5, stop=". ", include_stop_str_in_output=True)
        assert (done.text, done.completion.stop_string) == ("one. ", ". ")


async def test_what_ended_the_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's stop_reason and SGLang's matched_stop. Mutants: the model's own end is told as a stop token of the
    request, is not told as what matched, or the last token is where the length ended it."""
    says(monkeypatch, "one. two")
    token = ord("t") - 0x21
    cases: list[tuple[dict[str, Any], str | int | None, str | int | None]] = [
        ({"stop": ["two", ". "]}, ". ", ". "),
        ({"stop_token_ids": [token]}, token, token),
        ({"stop_token_ids": [token], "max_tokens": 2}, None, None),
        ({}, None, EOS),
    ]
    async with served(tmp_path) as (_, client, _):
        for fields, reason, matched in cases:
            asked = {"prompt": "x", "seed": 5, "max_tokens": 30, **fields}
            (choice,) = (await client.post(COMPLETIONS, json=asked)).json()["choices"]
            got = events(await client.post(COMPLETIONS, json=asked | {"stream": True}))
            for told in (choice, got[-1]["choices"][0]):
                assert (told["stop_reason"], told["matched_stop"]) == (reason, matched)


async def test_special_tokens_are_shown_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "ab")
    async with served(tmp_path) as (_, client, sdk):
        shown = {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 3}
        assert await text_of(client, **shown | {"skip_special_tokens": True}) == "ab"
        assert await text_of(client, **shown) == "ab</s>"
        assert await text_of(client, skip_special_tokens=False, include_stop_str_in_output=True) == "ab</s>"
        assert await text_of(client, skip_special_tokens=False) == "ab"  # it ended the answer
        assert (await sdk.generate("x", seed=5, **shown)).text == "ab</s>"  # type: ignore[arg-type]


async def test_a_prompt_is_cut_on_the_side_that_is_named(tmp_path: Path) -> None:
    """Mutants: the prompt that ``echo`` repeats is the whole one; one token is kept beside max_tokens that fill the
    context."""
    async with served(tmp_path) as (_, client, sdk):

        async def kept(prompt: Any, **body: Any) -> tuple[str, int]:
            asked = {"prompt": prompt, "max_tokens": 0, "echo": True, **body}
            answer = (await client.post(COMPLETIONS, json=asked)).json()
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]

        assert await kept("abcdef", truncate_prompt_tokens=2) == ("ef", 2)
        assert await kept("abcdef", truncate_prompt_tokens=2, truncation_side="right") == ("ab", 2)
        assert await kept("abcdef", truncate_prompt_tokens=9) == ("abcdef", 6)
        assert await kept(["abcdef", "xy"], truncate_prompt_tokens=3) == ("def", 5)
        long = "b" * 150 + "a" * 150
        assert await refused(client, COMPLETIONS, {"prompt": long}) == "prompt"
        assert await refused(client, COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 0}) == (
            "truncate_prompt_tokens"
        )
        nothing_left = {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 200}
        assert await refused(client, COMPLETIONS, nothing_left) == "max_tokens"
        done = await sdk.generate(long, max_tokens=20, truncate_prompt_tokens=-1)
        assert (done.completion.usage.prompt_tokens, done.completion.usage.completion_tokens) == (180, 20)
        chat = {"messages": MESSAGES, "max_tokens": 1, "truncate_prompt_tokens": 4}
        assert (await client.post(CHATS, json=chat)).json()["usage"]["prompt_tokens"] == 4


async def test_bad_words_reach_the_nodes_as_tokens(tmp_path: Path) -> None:
    async with served(tmp_path) as (made, client, sdk):
        await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "bad_words": [" no", "a", "no"]})
        await sdk.generate("x", max_tokens=2, bad_words="no")
        both, alone = (one.params.bad_token_ids for one in made.nodes["prefill-0"].sequences)
        letters = [tuple(ord(letter) - 0x21 for letter in word) for word in ("no", "a")]
        assert both == tuple(letters)
        assert alone == (letters[0],)
        assert await refused(client, COMPLETIONS, {"prompt": "x", "bad_words": ["a", " "]}) == "bad_words[1]"


async def test_reasoning_effort_is_for_templates_that_take_it(tmp_path: Path) -> None:
    async with served(tmp_path / "takes", EFFORT) as (made, client, sdk):
        usual = len((await sdk.tokenize(MESSAGES)).token_ids)
        for effort in ("high", "low"):
            body = {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": effort}
            prompt = (await client.post(CHATS, json=body)).json()["usage"]["prompt_tokens"]
            assert prompt == usual + len(f"effort {effort}") + 2
            assert len((await sdk.tokenize(MESSAGES, reasoning_effort=effort)).token_ids) == prompt
            asked: dict[str, Any] = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}
            assert (await client.post("/v1/responses", json=asked)).json()["usage"]["input_tokens"] == prompt
            asked = {"messages": MESSAGES, "max_tokens": 1, "output_config": {"effort": effort}}
            told = (await client.post("/v1/messages", json=asked)).json()["usage"]
            assert told["input_tokens"] + told["cache_read_input_tokens"] == (usual if effort == "high" else prompt)
        body |= {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert await refused(client, CHATS, body) == "reasoning_effort"
        (first, *_) = made.nodes["prefill-0"].sequences
        assert first.prompt_token_ids[0] == BOS
    async with served(tmp_path / "takes not") as (_, client, _sdk):
        for effort, status in (("medium", 200), ("none", 200), ("high", 400)):
            body = {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": effort}
            assert (await client.post(CHATS, json=body)).status_code == status, effort
        refusals: dict[str, tuple[dict[str, Any], str]] = {
            "/v1/responses": ({"input": "hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
            "/v1/messages": (
                {"messages": MESSAGES, "max_tokens": 1, "output_config": {"effort": "low"}},
                "output_config.effort",
            ),
        }
        for path, (asked, field) in refusals.items():
            said = await client.post(path, json=asked)
            assert (said.status_code, said.json()["error"]["message"].partition(":")[0]) == (400, field)


async def test_tokens_of_the_reasoning_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is a letter here: the markers count, the text behind them does not."""
    says(monkeypatch, "<think>hm</think>\n\nHello.")
    async with served(tmp_path, TEMPLATE + "{# </think> #}") as (_, client, sdk):
        body = {"messages": MESSAGES, "max_tokens": 60, "seed": 5}
        usage = (await client.post(CHATS, json=body)).json()["usage"]
        # The marker that begins the reasoning is known by its last letter.
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(">hm</think>")
        done = await sdk.generate(MESSAGES, max_tokens=60, seed=5)
        assert (done.text, done.choices[0].reasoning) == ("Hello.", "hm")
        assert done.completion.usage.reasoning_tokens == usage["completion_tokens_details"]["reasoning_tokens"]
        plain = (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 9})).json()["usage"]
        assert plain["completion_tokens_details"]["reasoning_tokens"] == 0
        assert EOS in done.token_ids
