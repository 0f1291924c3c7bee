"""AutoGen: its model client with text, streams, objects and tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("autogen-ext")


@pytest_asyncio.fixture
async def served(url: str, model: str) -> AsyncIterator[Any]:
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    made = client("autogen_ext.models.openai").OpenAIChatCompletionClient(
        model=model,
        base_url=f"{url}/v1",
        api_key=KEY,
        model_info={**info, "family": "unknown"},
        temperature=0,
        max_tokens=64,
    )
    yield made
    await made.close()


def said(text: str) -> list[Any]:
    return [client("autogen_core.models").UserMessage(content=text, source="somebody")]  # which becomes a name


async def test_text_and_streams(served: Any) -> None:
    text = (await served.create(said(QUESTION))).content
    assert ANSWER in text
    parts = [part async for part in served.create_stream(said(QUESTION))]
    assert "".join(parts[:-1]) == parts[-1].content == text


async def test_json(served: Any) -> None:
    done = await served.create(said(ASKED), json_output=Capital)
    assert Capital.model_validate_json(done.content)


async def test_tools(served: Any) -> None:
    async def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    tool = client("autogen_core.tools").FunctionTool(weather, description="The weather of a city.")
    done = await served.create(
        said(QUESTION), tools=[tool], tool_choice="required", extra_create_args={"parallel_tool_calls": False}
    )
    (call,) = done.content
    assert (call.name, list(json.loads(call.arguments))) == ("weather", ["city"])
