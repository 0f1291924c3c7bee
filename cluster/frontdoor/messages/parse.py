"""Turns a body of the Messages API into what the router is asked. `cluster.frontdoor.messages.requests` says which
fields there are; here is what they mean together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.contract.generation import Chat, ChatMessage, GenerationRequest, Tool, ToolChoice
from cluster.frontdoor.json_models import read
from cluster.frontdoor.messages.requests import (
    Block,
    ClientTool,
    CountTokensRequest,
    Message,
    MessageRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from cluster.frontdoor.own_fields import Calls, Names, OpenTurn, check_tools, generation, json_text
from paceline.errors import InvalidRequest
from paceline.request import Grammar, GrammarKind, SamplingParams
from paceline.results import ToolCall

NAMES = Names(
    {
        "messages": "messages",
        "prompt": "messages",
        "stop": "stop_sequences",
        "grammar": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }
)
USUAL_EFFORT = "high"  # Anthropic's, which means the same as leaving it out
_CHOICES = {"auto": ToolChoice.AUTO, "any": ToolChoice.REQUIRED, "tool": ToolChoice.NAMED, "none": ToolChoice.NONE}


def parse_message(body: dict[str, Any], request_id: str) -> tuple[MessageRequest, GenerationRequest]:
    """A body of ``/v1/messages``, and what the router is asked. Raises InvalidRequest naming the first field that is
    wrong."""
    asked = read(MessageRequest, body)
    format_ = asked.output_config.format if asked.output_config else None
    schema = None if format_ is None else json_text("output_config.format.schema", format_.schema_)
    sampling = SamplingParams(
        **asked.model_dump(include={"temperature", "top_p", "top_k", "seed"}, exclude_none=True),
        stop=tuple(asked.stop_sequences or ()),
        grammar=None if schema is None else Grammar(GrammarKind.JSON_SCHEMA, schema),
    )
    effort = (asked.output_config.effort if asked.output_config else None) or USUAL_EFFORT
    chat = replace(_chat(asked), reasoning_effort="" if effort == USUAL_EFFORT else effort)
    return asked, generation(asked, chat, sampling, asked.max_tokens, request_id)


def parse_count(body: dict[str, Any]) -> tuple[CountTokensRequest, Chat]:
    """A body of ``/v1/messages/count_tokens``, and the chat whose tokens are to be counted. Raises InvalidRequest
    naming the first field that is wrong."""
    asked = read(CountTokensRequest, body)
    return asked, _chat(asked)


def _chat(asked: CountTokensRequest) -> Chat:
    system = () if asked.system is None else (ChatMessage("system", _text(asked.system)),)
    choice = asked.tool_choice
    tools = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools or ()))
    chat = Chat(
        messages=(*system, *_turns(asked.messages)),
        tools=tools,
        tool_choice=ToolChoice.AUTO if choice is None else _CHOICES[choice.type],
        tool_name=choice.name or "" if choice is not None and choice.type == "tool" else "",
        one_tool_call=choice is not None and bool(choice.disable_parallel_tool_use),
        continue_final_message=asked.messages[-1].role == "assistant",
    )
    check_tools(chat.tools, chat.tool_choice, chat.tool_name)
    return chat


def _tool(where: str, tool: ClientTool) -> Tool:
    schema = json_text(f"{where}.input_schema", tool.input_schema)
    return Tool(tool.name, tool.description or "", schema, bool(tool.strict))


def _turns(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """The turns of a chat; what a tool said is a turn by itself."""
    calls, made = Calls(), list[ChatMessage]()
    for i, message in enumerate(messages):
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        turn = OpenTurn(message.role)
        for j, block in enumerate(blocks):
            where = f"messages[{i}].content[{j}]"
            _check_role(where, block, message.role)
            if isinstance(block, ToolResultBlock):
                said = calls.answered(f"{where}.tool_use_id", block.tool_use_id, _text(block.content or ""))
                made += [turn.closed(), said] if turn.texts else [said]
                turn = OpenTurn(message.role)
            else:
                _add(where, turn, block, calls)
        if not (blocks and isinstance(blocks[-1], ToolResultBlock)):
            made.append(turn.closed())
    return tuple(made)


def _check_role(where: str, block: Block, role: str) -> None:
    """Raise InvalidRequest for a block that the other side says."""
    says = {ToolResultBlock: "user", ToolUseBlock: "assistant", ThinkingBlock: "assistant"}.get(type(block), role)
    if says != role:
        raise InvalidRequest(f"{where}.type", f"{block.type!r} goes with the role {says!r} alone")


def _add(where: str, turn: OpenTurn, block: TextBlock | ToolUseBlock | ThinkingBlock, calls: Calls) -> None:
    """One more block of the turn."""
    match block:
        case TextBlock():
            turn.say(block.text)
        case ThinkingBlock():
            turn.thoughts.append(block.thinking)
        case ToolUseBlock():
            calls.made(block.id, block.name)
            turn.calls.append(ToolCall(block.id, block.name, json_text(f"{where}.input", block.input)))


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
