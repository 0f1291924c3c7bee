"""Clients that the tests bring with them, against one deployment. openai: chats, completions, objects, tools and
responses. anthropic: messages, streams, tools and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.support.other_clients import ANSWER, ASKED, HELLO, KEY, QUESTION, client

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Capital(BaseModel):
    """What an answer is read as."""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def openai(url: str) -> Iterator[Any]:
    with client("openai").OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.client("openai")
def test_text_and_streams(openai: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 24}
    text = openai.chat.completions.create(**asked).choices[0].message.content
    assert ANSWER in text
    stream = openai.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == text
    whole = openai.completions.create(model=model, prompt="1, 2, 3, 4,", temperature=0, max_tokens=8, logprobs=1)
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens == 8


@pytest.mark.client("openai")
def test_objects(openai: Any, model: str) -> None:
    asked = [{"role": "user", "content": ASKED}]
    done = openai.chat.completions.parse(model=model, messages=asked, response_format=Capital, temperature=0)
    assert done.choices[0].message.parsed.city in ("Paris", "Rome")


@pytest.mark.client("openai")
def test_tools(openai: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    asked["parallel_tool_calls"] = False  # so small a model would call without end
    done = openai.chat.completions.create(**asked, messages=HELLO).choices[0]
    (call, *_) = done.message.tool_calls
    assert (done.finish_reason, call.function.name) == ("tool_calls", "weather")
    arguments = ""
    for event in openai.chat.completions.create(**asked, messages=HELLO, stream=True):
        for part in event.choices[0].delta.tool_calls or () if event.choices else ():
            arguments += (part.function.arguments or "") if part.index == 0 else ""
    assert arguments == call.function.arguments
    turns = [*HELLO, done.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = openai.chat.completions.create(model=model, messages=turns, tools=[WEATHER], tool_choice="none")
    assert again.choices[0].message.content


@pytest.mark.client("openai")
def test_responses(openai: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 128}
    done = openai.responses.create(**asked)
    assert ANSWER in done.output_text
    with openai.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == done.output_text
    again = openai.responses.create(
        model=model, input="And of Italy?", previous_response_id=done.id, max_output_tokens=8
    )
    assert again.output_text


MESSAGES_WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def anthropic(url: str) -> Iterator[Any]:
    with client("anthropic").Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.client("anthropic")
def test_messages_text_and_streams(anthropic: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
    done = anthropic.messages.create(**asked)
    assert ANSWER in done.content[0].text
    with anthropic.messages.stream(**asked) as stream:
        assert stream.get_final_text() == done.content[0].text
    read = done.usage.input_tokens + done.usage.cache_read_input_tokens  # what a cache had is counted apart
    assert anthropic.messages.count_tokens(model=model, messages=HELLO).input_tokens == read


@pytest.mark.client("anthropic")
def test_messages_tools(anthropic: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "tools": [MESSAGES_WEATHER], "max_tokens": 200}
    done = anthropic.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call, *_) = [block for block in done.content if block.type == "tool_use"]
    assert (done.stop_reason, call.name, list(call.input)) == ("tool_use", "weather", ["city"])
