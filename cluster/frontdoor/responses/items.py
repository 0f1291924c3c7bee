"""Items of a conversation to turns of a chat.

What the model thought, said and called in one go are several items and one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cluster.contract.generation import ChatMessage
from cluster.frontdoor.own_fields import Calls, new_id
from cluster.frontdoor.responses.requests import CallItem, CallOutputItem, Item, MessageItem, Part, ReasoningItem
from paceline.results import ToolCall

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_SILENT = ChatMessage("assistant", "")


def turns(items: str | Sequence[Item], before: Iterable[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
    """The turns that ``items`` are. before: earlier turns, whose calls may be answered here. Raises InvalidRequest
    when an item answers a call that nobody made."""
    if isinstance(items, str):
        return (ChatMessage("user", items),)
    calls = Calls(before)
    made: list[ChatMessage] = []
    for i, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            made.append(calls.answered(f"input[{i}].call_id", item.call_id, _text(item.output)))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            made.append(ChatMessage("system" if item.role == "developer" else item.role, _text(item.content)))
        else:
            if isinstance(item, CallItem):
                calls.made(item.call_id, item.name)
            _say(made, item)
    return tuple(made)


def _say(made: list[ChatMessage], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Add to the assistant's turn, or begin one: in a turn the thought comes first, then the text, then the calls."""
    turn = made.pop() if made and made[-1].role == "assistant" else _SILENT
    if not isinstance(item, CallItem) and (turn.content or turn.tool_calls):
        made.append(turn)
        turn = _SILENT
    match item:
        case CallItem():
            call = ToolCall(item.call_id, item.name, item.arguments)
            turn = replace(turn, tool_calls=(*turn.tool_calls, call))
        case MessageItem():
            turn = replace(turn, content=_text(item.content))
        case ReasoningItem():
            turn = replace(turn, reasoning=turn.reasoning + "".join(part.text for part in item.content or ()))
    made.append(turn)


def listed(items: str | Sequence[Item]) -> tuple[dict[str, Any], ...]:
    """The items of an input as they are told: each with a type and an id, a message's text in parts."""
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    return tuple(_told(item) for item in items)


def _told(item: Item) -> dict[str, Any]:
    kind = item.type or "message"
    told = {**item.model_dump(exclude_none=True), "type": kind}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        told["content"] = [{"type": part, "text": item.content}]
    if not isinstance(told.get("id"), str):
        told["id"] = new_id(_PREFIXES[kind])
    return told


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
