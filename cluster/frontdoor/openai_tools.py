"""Reasoning and calls of tools in answers, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.results import Chunk, ToolCall


def message(text: str, reasoning: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """A whole message of the assistant."""
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    said: dict[str, Any] = {"role": "assistant", "content": None if made and not text else text, "refusal": None}
    if reasoning:
        said["reasoning_content"] = reasoning
    if made:
        said["tool_calls"] = made
    return said


def delta(chunk: Chunk) -> dict[str, Any]:
    """What a chunk adds to the message."""
    said: dict[str, Any] = {}
    if chunk.reasoning:
        said["reasoning_content"] = chunk.reasoning
    if chunk.text:
        said["content"] = chunk.text
    parts = []
    for part in chunk.tool_calls:
        if part.name:
            function = {"name": part.name, "arguments": part.arguments}
            parts.append({"index": part.index, "id": part.id, "type": "function", "function": function})
        else:
            parts.append({"index": part.index, "function": {"arguments": part.arguments}})
    if parts:
        said["tool_calls"] = parts
    return said
