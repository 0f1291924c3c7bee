"""What a client asked, as plain data under the names that the SDK's options have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from paceline.request import Grammar, GrammarKind
from paceline.v1 import common_pb2, inference_pb2
from paceline.wire import grammar_from_proto, tool_call_from_proto

_REQUEST = ("model", "request_id", "tenant", "priority", "truncate_prompt_tokens", "truncation_side")
_TURN = ("tool_call_id", "name", "reasoning")
_CHOICES = {
    inference_pb2.TOOL_CHOICE_NONE: "none",
    inference_pb2.TOOL_CHOICE_REQUIRED: "required",
}


@dataclass(frozen=True)
class Asked:
    """A request. Whoever compares options compares with what was given to the SDK, but that a pydantic model is its
    schema, a single ``stop`` a list, and the default of a chat's option not there."""

    prompt: str | list[int] | list[dict[str, Any]]  # a text, token ids, or the messages of a chat
    options: Mapping[str, Any] = field(default_factory=dict)  # those that were given, by their names
    streamed: bool = False  # whether the client asked for a stream
    resumed_at: Mapping[int, int] | None = None  # of a stream that broke: the tokens that the client has, by choice


def asked(message: inference_pb2.GenerateRequest, *, streamed: bool) -> Asked:
    """What ``message`` asks. InvalidRequest for a kind of grammar that is not known."""
    options: dict[str, Any] = _fields(message.sampling) | _fields(message.speculation)
    options |= {one.name: value for one, value in message.ListFields() if one.name in _REQUEST}
    if message.sampling.HasField("grammar"):
        del options["grammar"]
        options |= _format(grammar_from_proto(message.sampling.grammar))
    received = {one.choice: one.next_index for one in message.resume.choices} if message.HasField("resume") else None
    match message.WhichOneof("prompt"):
        case "chat":
            return Asked(messages(message.chat), options | chat_options(message.chat), streamed, received)
        case "token_ids":
            return Asked(list(message.token_ids.ids), options, streamed, received)
        case _:
            return Asked(message.text, options, streamed, received)


def messages(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """The turns of a chat, with what each of them has."""
    return [_turn(turn) for turn in chat.messages]


def chat_options(chat: inference_pb2.Chat) -> dict[str, Any]:
    """The options of a chat that are not the default."""
    options: dict[str, Any] = {}
    if chat.tools:
        options["tools"] = [_tool(tool) for tool in chat.tools]
    if chat.tool_choice:
        options["tool_choice"] = _CHOICES.get(chat.tool_choice, chat.tool_name)
    if chat.one_tool_call:
        options["parallel_tool_calls"] = False
    if chat.template_values:
        options["template_values"] = json.loads(chat.template_values)
    if chat.reasoning_effort:
        options["reasoning_effort"] = chat.reasoning_effort
    if chat.continue_final_message:
        options["continue_final_message"] = True
    return options


def _fields(message: common_pb2.SamplingParams | common_pb2.Speculation) -> dict[str, Any]:
    """The fields that are set, with lists and dictionaries for what protobuf has in their place."""
    return {one.name: _plain(value) for one, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | Message):
        return value
    return dict(value) if isinstance(value, Mapping) else list(value)


def _format(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"response_format": json.loads(grammar.source)}
        case GrammarKind.JSON_OBJECT:
            return {"response_format": "json_object"}
        case GrammarKind.CHOICE:
            return {"choice": json.loads(grammar.source)}
        case GrammarKind.REGEX:
            return {"regex": grammar.source}
        case GrammarKind.EBNF:
            return {"grammar": grammar.source}


def _turn(turn: inference_pb2.ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": turn.role, "content": turn.content}
    plain |= {name: getattr(turn, name) for name in _TURN if getattr(turn, name)}
    if turn.tool_calls:
        plain["tool_calls"] = [tool_call_from_proto(call) for call in turn.tool_calls]
    return plain


def _tool(tool: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
