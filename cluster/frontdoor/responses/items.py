"""Items of a conversation to turns of a chat.

What the model thought, said and called in one go are several items and one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.contract.generation import ChatMessage
from cluster.frontdoor.own_fields import Calls, OpenTurn, new_id
from cluster.frontdoor.responses.requests import CallItem, CallOutputItem, Item, MessageItem, Part, ReasoningItem
from paceline.results import ToolCall

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def turns(items: str | Sequence[Item], before: Iterable[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
    """The turns that ``items`` are. before: earlier turns, whose calls may be answered here. Raises InvalidRequest
    when an item answers a call that nobody made."""
    if isinstance(items, str):
        return (ChatMessage("user", items),)
    calls = Calls(before)
    made: list[ChatMessage | OpenTurn] = []
    for i, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            made.append(calls.answered(f"input[{i}].call_id", item.call_id, _text(item.output)))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            made.append(ChatMessage("system" if item.role == "developer" else item.role, _text(item.content)))
        else:
            if isinstance(item, CallItem):
                calls.made(item.call_id, item.name)
            _say(made, item)
    return tuple(turn.closed() if isinstance(turn, OpenTurn) else turn for turn in made)


def _say(made: list[ChatMessage | OpenTurn], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Add to the assistant's turn, or begin one: in a turn the thought comes first, then the text, then the calls."""
    turn = made[-1] if made else None
    if not isinstance(turn, OpenTurn) or (not isinstance(item, CallItem) and (turn.texts or turn.calls)):
        turn = OpenTurn("assistant")
        made.append(turn)
    match item:
        case CallItem():
            turn.calls.append(ToolCall(item.call_id, item.name, item.arguments))
        case MessageItem():
            turn.say(_text(item.content))
        case ReasoningItem():
            turn.thoughts += [part.text for part in item.content or ()]


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
