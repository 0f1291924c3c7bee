"""Tests of a program that uses the SDK, against the fake server: no model, no deployment. Also runs under pytest."""

from __future__ import annotations

import argparse

from paceline.client import Client, Overloaded, ToolCall
from paceline.client.testing import Answer, FakeServer

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def summary(address: str, text: str) -> str:
    """The program: a summary of ``text``, or what to tell a user whose turn is later."""
    with Client(address) as client:
        try:
            parts = client.stream([{"role": "user", "content": f"Summarize: {text}"}], tools=[TOOL], temperature=0)
            return "".join(chunk.text for chunk in parts)
        except Overloaded as error:
            return f"Please come back in {error.retry_after_s:g} seconds."


def test_a_summary() -> None:
    """The program asks what it should, and gives what it gets, although the connection breaks."""
    with FakeServer(Answer("It is short.", breaks_after=5)) as server:
        assert summary(server.address, "a long text") == "It is short."
        first, again = server.requests
        assert first.prompt == [{"role": "user", "content": "Summarize: a long text"}]
        assert first.options == {"temperature": 0.0, "tools": [TOOL]}
        assert again.resumed_at == {0: 5}


def test_a_full_house() -> None:
    """An error has its meaning."""
    with FakeServer(Overloaded("full", retry_after_s=3)) as server:
        assert summary(server.address, "a text") == "Please come back in 3 seconds."


def test_a_call_of_a_tool() -> None:
    """The answer is no text at all."""
    with FakeServer(Answer(tool_calls=[ToolCall("call-1", "weather", "{}")])) as server:
        assert summary(server.address, "a text") == ""


def main() -> None:
    """Run the tests without pytest."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for test in (test_a_summary, test_a_full_house, test_a_call_of_a_tool):
        test()
        print(f"{test.__name__}: passed")


if __name__ == "__main__":
    main()
