"""smolagents' model of an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("smolagents")


@pytest.fixture
def served(url: str, model: str) -> Any:
    kind = client("smolagents").OpenAIModel
    return kind(model_id=model, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=64)


def said(text: str) -> list[Any]:
    return [client("smolagents").ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def test_text_and_streams(served: Any) -> None:
    text = served.generate(said(QUESTION)).content
    assert ANSWER in text
    assert "".join(part.content or "" for part in served.generate_stream(said(QUESTION))) == text


def test_json_and_tools(served: Any) -> None:
    schema = {"name": "capital", "schema": Capital.model_json_schema(), "strict": True}
    done = served.generate(said(ASKED), response_format={"type": "json_schema", "json_schema": schema})
    assert Capital.model_validate_json(done.content)

    @client("smolagents").tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return city

    calls = served.generate(said(QUESTION), tools_to_call_from=[weather]).tool_calls
    assert calls[0].function.name == "weather"
