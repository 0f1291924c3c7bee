"""Turns a body of ``POST /v1/responses`` into what the router is asked. `cluster.frontdoor.responses.requests` says
which fields there are; here is what they mean together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cluster.contract.generation import MAX_MESSAGES, Chat, ChatMessage, GenerationRequest, Tool, ToolChoice
from cluster.frontdoor.json_models import read
from cluster.frontdoor.openai_parse import sampling_of
from cluster.frontdoor.own_fields import Names, check_tools, generation, json_text
from cluster.frontdoor.responses.items import turns
from cluster.frontdoor.responses.requests import FunctionTool, NamedTool, ResponseRequest, TextFormat
from paceline.errors import InvalidRequest
from paceline.request import Grammar, GrammarKind

NAMES = Names(
    {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "grammar": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
)


@dataclass(frozen=True)
class Asked:
    """A parsed body."""

    body: ResponseRequest  # as it was sent
    generation: GenerationRequest  # what the router is asked
    turns: tuple[ChatMessage, ...]  # the conversation with this input, without the instructions

    @property
    def stored(self) -> bool:
        """Whether the answer is kept."""
        return self.body.store is not False


def read_body(body: dict[str, Any]) -> ResponseRequest:
    """What each field says by itself, and which go together. Raises InvalidRequest naming the first that is wrong."""
    asked = read(ResponseRequest, body)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options", "only goes with stream")
    if asked.background and asked.stream:
        raise InvalidRequest("background", "does not go with stream here; ask for the answer by its id")
    if asked.background and asked.store is False:
        raise InvalidRequest("background", "needs store: nobody else could ask for the answer")
    return asked


def parse(asked: ResponseRequest, before: tuple[ChatMessage, ...], response_id: str) -> Asked:
    """before: turns of the answer that ``previous_response_id`` names. Raises InvalidRequest naming the first field
    that is wrong."""
    conversation = (*before, *turns(asked.input, before))
    if len(conversation) > MAX_MESSAGES:
        raise InvalidRequest("previous_response_id", f"brings the turns to {len(conversation)}; at most {MAX_MESSAGES}")
    system = () if asked.instructions is None else (ChatMessage("system", asked.instructions),)
    choice, tool_name = _tool_choice(asked)
    tools = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools or ()))
    check_tools(tools, choice, tool_name)
    chat = Chat(
        messages=(*system, *conversation),
        tools=tools,
        tool_choice=choice,
        tool_name=tool_name,
        one_tool_call=asked.parallel_tool_calls is False,
        reasoning_effort=(asked.reasoning.effort if asked.reasoning else None) or "",
    )
    sampling = replace(sampling_of(asked), seed=asked.seed, grammar=_grammar(asked.text.format if asked.text else None))
    made = generation(asked, chat, sampling, asked.max_output_tokens, response_id)
    return Asked(asked, made, conversation)


def _tool(where: str, tool: FunctionTool) -> Tool:
    parameters = json_text(f"{where}.parameters", tool.parameters)
    return Tool(tool.name, tool.description or "", parameters, bool(tool.strict))


def _tool_choice(asked: ResponseRequest) -> tuple[ToolChoice, str]:
    """The choice, and the tool that it names."""
    if isinstance(asked.tool_choice, NamedTool):
        return ToolChoice.NAMED, asked.tool_choice.name
    return ToolChoice(asked.tool_choice or "auto"), ""


def _grammar(format_: TextFormat | None) -> Grammar | None:
    """What the text must be, if it may not be anything."""
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if format_.schema_ is None:
        raise InvalidRequest("text.format.schema", "is missing")
    return Grammar(GrammarKind.JSON_SCHEMA, json_text("text.format.schema", format_.schema_))
