"""The anthropic client: messages, streams, tools and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.other_clients import ANSWER, HELLO, KEY, client

pytestmark = pytest.mark.client("anthropic")

WEATHER: dict[str, Any] = {
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


def test_text_and_streams(anthropic: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
    done = anthropic.messages.create(**asked)
    assert ANSWER in done.content[0].text
    with anthropic.messages.stream(**asked) as stream:
        assert stream.get_final_text() == done.content[0].text
    read = done.usage.input_tokens + done.usage.cache_read_input_tokens  # what a cache had is counted apart
    assert anthropic.messages.count_tokens(model=model, messages=HELLO).input_tokens == read


def test_tools(anthropic: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "tools": [WEATHER], "max_tokens": 200}
    done = anthropic.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call, *_) = [block for block in done.content if block.type == "tool_use"]
    assert (done.stop_reason, call.name, list(call.input)) == ("tool_use", "weather", ["city"])
