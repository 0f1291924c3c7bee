"""A LangGraph graph of a model that calls a tool, the tool, and the model that is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.other_clients import KEY, QUESTION, client

pytestmark = pytest.mark.client("langgraph")


def test_a_graph_with_a_tool(url: str, model: str) -> None:
    graphs, prebuilt = client("langgraph.graph"), client("langgraph.prebuilt")
    kind = client("langchain_openai").ChatOpenAI
    chat = kind(model=model, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=64, max_retries=0)

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"{city}: sunny"

    def calls(state: Any) -> Any:
        return {"messages": [chat.bind_tools([weather], tool_choice="any").invoke(state["messages"])]}

    def answers(state: Any) -> Any:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("calls", calls)
    graph.add_node("tools", prebuilt.ToolNode([weather]))
    graph.add_node("answers", answers)
    for edge in ((graphs.START, "calls"), ("calls", "tools"), ("tools", "answers")):
        graph.add_edge(*edge)
    turns = graph.compile().invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [turn.type for turn in turns][:3] == ["human", "ai", "tool"]
    assert turns[2].content.endswith("sunny")
    assert turns[-1].content
