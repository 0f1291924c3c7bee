"""litellm, as a client of an OpenAI-compatible server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.test_own_clients import WEATHER, Capital
from tests.support.other_clients import ANSWER, ASKED, HELLO, KEY, client

pytestmark = pytest.mark.client("litellm")


@pytest.fixture
def ask(url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the net
    litellm = client("litellm")

    def completion(**asked: Any) -> Any:
        where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}
        return litellm.completion(**where, **{"messages": HELLO, "temperature": 0, "max_tokens": 128, **asked})

    return completion


def test_text_and_streams(ask: Any) -> None:
    text = ask(max_tokens=24).choices[0].message.content
    assert ANSWER in text
    stream = ask(max_tokens=24, stream=True, stream_options={"include_usage": True})
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == text


def test_json(ask: Any) -> None:
    done = ask(messages=[{"role": "user", "content": ASKED}], response_format=Capital)
    assert Capital.model_validate_json(done.choices[0].message.content)


def test_tools(ask: Any) -> None:
    done = ask(tools=[WEATHER], tool_choice="required").choices[0].message
    call = done.tool_calls[0]
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("weather", ["city"])
    turns = [*HELLO, done.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(messages=turns, tools=[WEATHER], tool_choice="none").choices[0].message.content
