"""Chats of the SDK's users as messages: turns, tools, and what else a chat template is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from paceline.results import ToolCall
from paceline.v1 import inference_pb2
from paceline.wire import tool_call_to_proto

Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "..."}]

_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
_TEXTS = ("tool_call_id", "name", "reasoning")
_CHOICES = {
    "auto": inference_pb2.TOOL_CHOICE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_NONE,
    "required": inference_pb2.TOOL_CHOICE_REQUIRED,
}
_OF_A_TOOL = ("name", "description", "parameters", "strict")


class ChatOptions(TypedDict, total=False):
    """Options of a chat: they are part of the prompt, or say how the answer is read."""

    tools: Annotated[
        Sequence[Mapping[str, Any]] | None, "What the model may call, as the OpenAI API has it; at most 128."
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any] | None, 'Whether it calls: "auto", "none", "required", or the name of one tool.'
    ]
    parallel_tool_calls: Annotated[bool | None, "Whether an answer may have several calls; the default is yes."]
    template_values: Annotated[
        Mapping[str, Any] | None, 'More values for the chat template, e.g. `{"enable_thinking": False}`.'
    ]
    reasoning_effort: Annotated[str | None, "How much the model is to think, where its chat template takes that."]
    continue_final_message: Annotated[bool | None, "The last turn is the beginning of the answer, which goes on."]


CHAT_OPTIONS = tuple(ChatOptions.__annotations__)


def chat_to_proto(messages: Messages, options: Mapping[str, Any]) -> inference_pb2.Chat:
    """A chat with its options (ChatOptions) as a message. TypeError for what has another shape."""
    for name in ("parallel_tool_calls", "continue_final_message"):
        if not isinstance(options.get(name, False), bool):
            raise TypeError(f"{name} is True or False, got {options[name]!r}")
    chat = inference_pb2.Chat(
        messages=[_turn(turn) for turn in messages],
        tools=[_tool(tool) for tool in options.get("tools", ())],
        one_tool_call=not options.get("parallel_tool_calls", True),
        continue_final_message=options.get("continue_final_message", False),
        reasoning_effort=options.get("reasoning_effort", ""),
    )
    if "template_values" in options:
        chat.template_values = json_of("template_values", options["template_values"])
    if "tool_choice" in options:
        chat.tool_choice, chat.tool_name = _choice(options["tool_choice"])
    return chat


def json_of(name: str, value: Any) -> str:
    """``value`` as JSON. TypeError unless it is a mapping, and of what JSON has."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a mapping, got {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} is not JSON: {error}") from None


def _turn(turn: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    if unknown := set(turn) - set(_KEYS):
        raise TypeError(f"a chat message has no {sorted(unknown)[0]!r}; it may have {', '.join(_KEYS)}")
    calls = turn.get("tool_calls") or ()
    content = turn.get("content")
    if "role" not in turn or (content is None and not calls):
        raise TypeError(f"a chat message has a role, and a content unless it has tool_calls; got {sorted(turn)}")
    return inference_pb2.ChatMessage(
        role=turn["role"],
        content="" if content is None else content,
        tool_calls=[_call(call) for call in calls],
        **{name: turn[name] for name in _TEXTS if turn.get(name) is not None},
    )


def _call(call: ToolCall | Mapping[str, Any]) -> inference_pb2.ToolCall:
    """A call of an earlier answer, as the SDK or as the OpenAI API has it."""
    if isinstance(call, ToolCall):
        return tool_call_to_proto(call)
    try:
        function = call["function"]
        return inference_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])
    except (KeyError, TypeError):
        shape = '{"id": ..., "function": {"name": ..., "arguments": ...}}'
        raise TypeError(f"a call in tool_calls is a ToolCall or {shape}, with texts") from None


def _tool(tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function or tool.get("type", "function") != "function":
        raise TypeError(f'a tool is {{"type": "function", "function": {{"name": ...}}}}, got {tool!r:.200}')
    if unknown := set(function) - set(_OF_A_TOOL):
        raise TypeError(f"a tool has no {sorted(unknown)[0]!r}; it may have {', '.join(_OF_A_TOOL)}")
    given = {name: value for name, value in function.items() if value is not None}
    if "parameters" in given:
        given["parameters"] = json_of("parameters of a tool", given["parameters"])
    return inference_pb2.Tool(**given)


def _choice(choice: str | Mapping[str, Any]) -> tuple[inference_pb2.ToolChoice.ValueType, str]:
    if isinstance(choice, str):
        known = _CHOICES.get(choice)
        return (inference_pb2.TOOL_CHOICE_NAMED, choice) if known is None else (known, "")
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        raise TypeError(f'tool_choice is "auto", "none", "required", a name or {{"name": ...}}, got {choice!r:.200}')
    return inference_pb2.TOOL_CHOICE_NAMED, named["name"]
