"""OpenAI's agents, over chat completions and over responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("openai-agents")


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def served(url: str, model: str, request: pytest.FixtureRequest) -> Any:
    agents = client("agents")
    agents.set_tracing_disabled(True)
    openai_client = client("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return getattr(agents, request.param)(model=model, openai_client=openai_client)


async def test_text_and_streams(served: Any) -> None:
    agents = client("agents")
    settings = agents.ModelSettings(temperature=0, max_tokens=400)  # an answer that is cut is an error for the client
    agent = agents.Agent(name="one", model=served, model_settings=settings)
    text = (await agents.Runner.run(agent, QUESTION)).final_output
    assert ANSWER in text
    stream = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in stream.stream_events():
        pass
    assert stream.final_output == text


async def test_objects_and_tools(served: Any) -> None:
    agents = client("agents")
    settings = agents.ModelSettings(temperature=0, max_tokens=64)
    agent = agents.Agent(name="two", model=served, model_settings=settings, output_type=Capital)
    assert (await agents.Runner.run(agent, ASKED)).final_output.city in ("Paris", "Rome")
    asked: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    settings = agents.ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    agent = agents.Agent(name="three", model=served, model_settings=settings, tools=[weather])
    await agents.Runner.run(agent, QUESTION, max_turns=3)
    assert asked
