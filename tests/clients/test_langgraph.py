"""LangGraph: a model that calls a tool, the tool, and the model that is told; a streamed graph, and an object."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ASKED, KEY, QUESTION, client

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


def test_streams_and_objects(url: str, model: str) -> None:
    graphs = client("langgraph.graph")
    kind = client("langchain_openai").ChatOpenAI
    chat = kind(model=model, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=64, max_retries=0)
    found: list[Any] = []

    def answers(state: Any) -> Any:
        return {"messages": [chat.invoke(state["messages"])]}

    def reads(state: Any) -> Any:
        found.append(chat.with_structured_output(Capital, method="json_schema").invoke(ASKED))
        return {"messages": []}

    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("answers", answers)
    graph.add_node("reads", reads)
    for edge in ((graphs.START, "answers"), ("answers", "reads")):
        graph.add_edge(*edge)
    parts = graph.compile().stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    text = "".join(part.content for part, about in parts if about["langgraph_node"] == "answers")
    assert text == chat.invoke(QUESTION).content
    assert found[0].city in ("Paris", "Rome")
