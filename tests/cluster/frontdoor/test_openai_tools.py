"""Tools by the official OpenAI client: router and HTTP as they are served, over nodes that say what the test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.frontdoor.http import create_app, serve_http
from cluster.routing.metrics import Metrics
from paceline.text.tokenizer import Tokenizer
from tests.cluster.routing.test_answer_parts import ANSWER, ARGUMENTS, says
from tests.support.scripted_nodes import Fleet, Script, fleet
from tests.support.tiny_chat import TEMPLATE, write_chat_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
TURNS: Any = [{"role": "user", "content": "Weather?"}]
# Shows what it is given, and its answers begin with reasoning.
TOLD = (
    "{{ [messages, tools, style | default(none)] | tojson }}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)
KNOWN = TOLD + '{# <tool_call> {"name", "arguments"} </think> #}'


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Fleet]]:
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path, KNOWN))
    async with fleet(tokenizer=tokenizer, max_model_len=8192) as made:
        server = await serve_http(create_app(made.router, Metrics()), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            yield client, made
        await server.stop(0.0)


def told(made: Fleet) -> list[Any]:
    """Messages, tools and style that the template was given last."""
    (sequence,) = made.nodes["decode-0"].sequences[-1:]
    tokenizer: Any = made.router.tokenizer
    text = tokenizer.decode(sequence.prompt_token_ids, False)
    found: list[Any] = json.JSONDecoder().raw_decode(text)[0]
    return found


async def test_a_call_and_its_result(served: tuple[openai.AsyncOpenAI, Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    client, made = served
    says(monkeypatch, f"hm\n</think>\n\n{ANSWER}")
    answer = await client.chat.completions.create(model="tiny", messages=TURNS, tools=[TOOL], seed=3)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "hm"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert told(made)[1] == [TOOL]

    says(monkeypatch, "</think>Sunny.")
    turns = [*TURNS, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sun", "name": "w"}]
    again = await client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    assert again.choices[0].message.content == "Sunny."
    assert again.choices[0].message.tool_calls is None
    messages, _, _ = told(made)
    function = {"name": "get_weather", "arguments": json.loads(ARGUMENTS)}
    assert messages[1]["tool_calls"] == [{"id": call.id, "type": "function", "function": function}]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("I look.", "hm")
    assert messages[2] == {"role": "tool", "content": "sun", "tool_call_id": call.id, "name": "w"}


@pytest.mark.parametrize("tokens", [2, 500])
async def test_a_stream_is_the_answer(
    tokens: int, served: tuple[openai.AsyncOpenAI, Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokens: of a round. Mutants: several calls in an event; log-probabilities with each event of a round."""
    client, made = served
    made.nodes["decode-0"].script = Script(round_size=tokens)
    says(monkeypatch, f"hm\n</think>{ANSWER}\n{ANSWER[8:]}")
    asked: Any = {"model": "tiny", "messages": TURNS, "tools": [TOOL], "seed": 3, "logprobs": True}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    deltas, logprobs = [], list[Any]()
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        deltas += [(choice.delta, choice.finish_reason) for choice in chunk.choices]
        for choice in chunk.choices:
            logprobs += choice.logprobs.content or [] if choice.logprobs else []
    assert whole.logprobs is not None
    assert logprobs == whole.logprobs.content
    assert [reason for _, reason in deltas if reason] == [whole.finish_reason] == ["tool_calls"]
    assert deltas[-1][1]
    for delta, _ in deltas:  # clients look at the first part of an event alone
        assert len(delta.tool_calls or []) <= 1, delta
    assert "".join(delta.content or "" for delta, _ in deltas) == whole.message.content
    thought = [(delta.model_extra or {}).get("reasoning_content", "") for delta, _ in deltas]
    assert "".join(thought) == "hm"
    parts = [part for delta, _ in deltas for part in delta.tool_calls or []]
    assert whole.message.tool_calls is not None
    for index, call in enumerate(whole.message.tool_calls):
        first, *rest = [part for part in parts if part.index == index]
        assert first.function is not None
        assert call.type == "function"
        assert (first.id, first.type, first.function.name) == (call.id, "function", call.function.name)
        assert all(part.id is None and part.type is None for part in rest)
        pieces = [part.function.arguments or "" for part in (first, *rest) if part.function is not None]
        assert "".join(pieces) == call.function.arguments
        assert len(pieces) > 2 or tokens > 2


async def test_no_text_is_null(served: tuple[openai.AsyncOpenAI, Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, f"</think>{ANSWER[8:]}")
    answer = await served[0].chat.completions.create(model="tiny", messages=TURNS, tools=[TOOL])
    assert answer.choices[0].message.content is None


async def test_choices_of_tools(served: tuple[openai.AsyncOpenAI, Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    client, made = served
    says(monkeypatch, f"</think>{ANSWER}{ANSWER}")
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    asked: list[tuple[Any, int, list[Any] | None]] = [("none", 0, None), ("auto", 2, [TOOL]), ("required", 2, [TOOL])]
    for choice, calls, tools in [*asked, (named, 1, [TOOL])]:
        answer = await client.chat.completions.create(model="tiny", messages=TURNS, tools=[TOOL], tool_choice=choice)
        assert len(answer.choices[0].message.tool_calls or []) == calls
        assert told(made)[1] == tools
        grammar = made.nodes["decode-0"].sequences[-1].params.grammar
        assert (grammar is not None) is (choice in ("required", named))
    one = await client.chat.completions.create(model="tiny", messages=TURNS, tools=[TOOL], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1


async def test_values_and_an_open_message(
    served: tuple[openai.AsyncOpenAI, Fleet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client, made = served
    says(monkeypatch, "x")
    values = {"chat_template_kwargs": {"style": [1, "a"]}}
    await client.chat.completions.create(model="tiny", messages=TURNS, extra_body=values)
    assert told(made)[2] == [1, "a"]
    await client.chat.completions.create(model="tiny", messages=TURNS, extra_body={"add_generation_prompt": False})
    prompt = made.nodes["decode-0"].sequences[-1].prompt_token_ids
    tokenizer: Any = made.router.tokenizer
    assert not tokenizer.decode(prompt, False).endswith("<think>\n")
    plain = Tokenizer.from_folder(write_chat_tokenizer(tmp_path / "plain", TEMPLATE))
    made.router.tokenizer = plain
    turns = [*TURNS, {"role": "assistant", "content": "It is"}]
    await client.chat.completions.create(model="tiny", messages=turns, extra_body={"continue_final_message": True})
    prompt = made.nodes["decode-0"].sequences[-1].prompt_token_ids
    assert plain.decode(prompt, False).endswith("<s>assistant\nIt is")


CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "9"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
    ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs.tools"),
    ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "field"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_refused_by_name(served: tuple[openai.AsyncOpenAI, Fleet], more: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await served[0].chat.completions.create(**{"model": "tiny", "messages": TURNS, **more})
    assert raised.value.param == field
