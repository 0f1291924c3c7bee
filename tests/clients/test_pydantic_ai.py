"""pydantic-ai agents: text, streams, and objects by schema and by tool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("pydantic-ai-slim")


@pytest.fixture
def served(url: str, model: str) -> Any:
    kind = client("pydantic_ai.models.openai").OpenAIChatModel
    provider = client("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    return kind(model, provider=provider, settings={"temperature": 0, "max_tokens": 64})


async def test_text_and_streams(served: Any) -> None:
    agent = client("pydantic_ai").Agent(served)
    text = (await agent.run(QUESTION)).output
    assert ANSWER in text
    async with agent.run_stream(QUESTION) as stream:
        assert await stream.get_output() == text


@pytest.mark.parametrize("output", ["NativeOutput", "ToolOutput"])
async def test_objects(served: Any, output: str) -> None:
    pydantic_ai = client("pydantic_ai")
    agent = pydantic_ai.Agent(served, output_type=getattr(pydantic_ai, output)(Capital))
    assert (await agent.run(ASKED)).output.city in ("Paris", "Rome")
