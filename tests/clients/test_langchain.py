"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import WEATHER, Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("langchain-openai")


@pytest.fixture
def chat(url: str, model: str) -> Any:
    kind = client("langchain_openai").ChatOpenAI
    return kind(model=model, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=128, max_retries=0)


def test_text_and_streams(chat: Any) -> None:
    text = chat.invoke(QUESTION).content
    assert ANSWER in text
    assert "".join(part.content for part in chat.stream(QUESTION)) == text


def test_objects(chat: Any) -> None:
    assert chat.with_structured_output(Capital, method="json_schema").invoke(ASKED).city in ("Paris", "Rome")


def test_tools(chat: Any) -> None:
    messages = client("langchain_core.messages")
    answer = chat.bind_tools([WEATHER], tool_choice="any").invoke(QUESTION)
    (call, *_) = answer.tool_calls
    assert (call["name"], list(call["args"])) == ("weather", ["city"])
    told = messages.ToolMessage("sunny", tool_call_id=call["id"])
    assert chat.bind_tools([WEATHER], tool_choice="none").invoke([("user", QUESTION), answer, told]).content
