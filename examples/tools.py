"""Tools: the model calls a function of this program, which answers, and the model is told."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paceline.client import Client

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Madrid"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def weather(city: str) -> str:
    """What the tool answers."""
    return f"It is sunny in {city}."


def main() -> None:
    """Ask the router at --server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT of a router's gRPC")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same text")
    options = parser.parse_args()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with Client(options.server) as client:
        done = client.chat(messages, tools=[WEATHER], tool_choice="required", max_tokens=128, seed=options.seed)
        messages.append(done.message)
        for call in done.tool_calls:
            print(f"called: {call.name}({call.arguments})")
            told = weather(**json.loads(call.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
            print(f"told: {told}")
        done = client.chat(messages, tools=[WEATHER], tool_choice="none", max_tokens=48, seed=options.seed)
        print(done.text)


if __name__ == "__main__":
    main()
