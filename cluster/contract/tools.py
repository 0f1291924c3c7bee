"""Tools of a chat: what is checked of them, what the template is given, and how the answer is to be read.

The router knows from the model's chat template how the model writes calls and reasoning (`AnswerStyle`), unless an
operator has said so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.contract.generation import (
    MAX_TEXT_ARGUMENTS,
    MAX_TOOLS,
    Chat,
    ChatMessage,
    Tool,
    ToolChoice,
    check_count,
    check_name,
    check_unicode,
)
from paceline.config import ServeConfig
from paceline.errors import InvalidRequest, quoted
from paceline.parsing.answer import AnswerFormat, CallableTool
from paceline.parsing.formats.base import ToolSchema
from paceline.parsing.formats.lark import is_text
from paceline.parsing.formats.lark import quoted as literal_text
from paceline.parsing.grammar import Calls, Thinking, call_grammar, thinking_grammar
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, detect_reasoning, detect_tool_calls
from paceline.request import Grammar, GrammarKind

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_SCHEMA_CHARS = 64 * 1024  # of the arguments of one tool
MAX_TOOLS_CHARS = 512 * 1024  # of all tools of a request
MAX_JSON_VALUES = 20_000  # of one schema, or of the arguments of a call
MAX_VALUES_CHARS = 16 * 1024  # of the values for the template
MAX_ARGUMENTS_CHARS = 1024 * 1024  # of a call in a message
TAIL_TOKENS = 32  # of a prompt, which tell whether it ends within the reasoning
AUTO, NONE = "auto", "none"
EFFORT, USUAL_EFFORT = "reasoning_effort", "medium"  # the latter means the same as leaving it out
RESERVED_VALUES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class Template(Protocol):
    """paceline.text.templates.ChatTemplate, as far as the router needs it."""

    @property
    def source(self) -> str: ...

    @property
    def knows_tools(self) -> bool: ...


@dataclass(frozen=True)
class AnswerStyle:
    """How the served model writes."""

    tool_calls: str = ""  # a name of TOOL_FORMATS; empty: no calls are read, and tools are refused
    reasoning: str = ""  # a name of REASONING_FORMATS; empty: none
    native_tools: bool = False  # the chat template is given the tools; else they are told in text
    takes_effort: bool = False  # the chat template asks for reasoning_effort


NO_STYLE = AnswerStyle()  # neither calls nor reasoning are read


def answer_style(config: ServeConfig, template: Template | None) -> AnswerStyle:
    """What the options say, and where they say ``auto`` what the template teaches."""
    source = template.source if template is not None else ""
    knows = template is not None and template.knows_tools
    calls: str = config.tool_call_parser
    if calls == AUTO:
        # A template whose form is not known is not given the tools: they are told in text, in the Hermes form.
        detected = detect_tool_calls(source) if knows else ""
        knows, calls = bool(detected), detected or "hermes"
    reasoning = detect_reasoning(source) if config.reasoning_parser == AUTO else config.reasoning_parser
    effort = EFFORT in source
    return AnswerStyle("" if calls == NONE else calls, "" if reasoning == NONE else reasoning, knows, effort)


# -- what is checked -----------------------------------------------------------------------------------------------


def check_tools(chat: Chat, style: AnswerStyle) -> None:
    """Raise InvalidRequest naming the first field of tools and calls that is wrong."""
    check_count("tools", len(chat.tools), MAX_TOOLS)
    if chat.tools and not style.tool_calls:
        raise InvalidRequest("tools", "are not served here: the deployment has no tool_call_parser")
    names: dict[str, int] = {}
    size = 0
    for i, tool in enumerate(chat.tools):
        _check_tool(f"tools[{i}]", tool)
        if tool.name in names:
            raise InvalidRequest(f"tools[{i}].name", f"{tool.name!r} is the name of tools[{names[tool.name]}] too")
        names[tool.name] = i
        size += len(tool.description) + len(tool.parameters)
        if size > MAX_TOOLS_CHARS:
            raise InvalidRequest("tools", f"have more than {MAX_TOOLS_CHARS} characters")
    if chat.tool_choice in (ToolChoice.REQUIRED, ToolChoice.NAMED) and not chat.tools:
        raise InvalidRequest("tool_choice", f"{chat.tool_choice.value} needs tools")
    if chat.tool_choice is ToolChoice.NAMED and chat.tool_name not in names:
        raise InvalidRequest("tool_name", f"{quoted(chat.tool_name)} is none of the tools")
    _check_calls(chat.messages)


def _check_tool(where: str, tool: Tool) -> None:
    if not TOOL_NAME.fullmatch(tool.name):
        raise InvalidRequest(f"{where}.name", "must be 1 to 64 letters, digits, '_', '-' and '.'")
    check_unicode(f"{where}.description", tool.description)
    if len(tool.parameters) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{where}.parameters", f"has more than {MAX_SCHEMA_CHARS} characters")
    schema = json_object(f"{where}.parameters", tool.parameters)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.parameters", 'must be a schema of an object: its type is not "object"')


def _check_calls(messages: Sequence[ChatMessage]) -> None:
    """Calls are of assistants, and every result answers a call that stands before it."""
    open_: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        check_unicode(f"{where}.name", message.name)
        check_unicode(f"{where}.reasoning", message.reasoning)
        check_count(f"{where}.tool_calls", len(message.tool_calls), MAX_TOOLS)
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls", "only go with the role assistant")
        if message.reasoning and message.role != "assistant":
            raise InvalidRequest(f"{where}.reasoning", "only goes with the role assistant")
        for j, call in enumerate(message.tool_calls):
            if not TOOL_NAME.fullmatch(call.name):
                raise InvalidRequest(
                    f"{where}.tool_calls[{j}].name", "must be 1 to 64 letters, digits, '_', '-' and '.'"
                )
            check_unicode(f"{where}.tool_calls[{j}].id", call.id)
            if len(call.arguments) > MAX_ARGUMENTS_CHARS:
                raise InvalidRequest(
                    f"{where}.tool_calls[{j}].arguments", f"have more than {MAX_ARGUMENTS_CHARS} characters"
                )
            arguments = f"{where}.tool_calls[{j}].arguments"
            check_values(arguments, json_object(arguments, call.arguments))
            open_.add(call.id)
        if message.role != "tool" and message.tool_call_id:
            raise InvalidRequest(f"{where}.tool_call_id", "only goes with the role tool")
        if message.role == "tool" and message.tool_call_id not in open_:
            raise InvalidRequest(
                f"{where}.tool_call_id", f"{quoted(message.tool_call_id)} is the id of no call before it"
            )


def json_object(where: str, text: str) -> dict[str, Any]:
    """A JSON object; of an empty text an empty one. Raises InvalidRequest."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(where, f"is not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be a JSON object")
    check_unicode(where, text)
    return value


def check_values(field: str, root: object) -> None:
    """Raise InvalidRequest for ``field`` where it has more than MAX_JSON_VALUES, before all are looked at."""
    open_, values = [root], 0
    while open_:
        value = open_.pop()
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += len(items)
        if values > MAX_JSON_VALUES:
            raise InvalidRequest(field, f"has more than {MAX_JSON_VALUES} values")
        open_ += items


# -- what the template is given ------------------------------------------------------------------------------------


def template_messages(chat: Chat) -> list[dict[str, Any]]:
    """The turns as Hugging Face's templates take them; fields that are empty are left out."""
    return [_template_message(message) for message in chat.messages]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json_object("", call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    if message.reasoning:  # templates call it by any of these
        told |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning, "thinking": message.reasoning}
    return told


def template_options(chat: Chat, style: AnswerStyle) -> dict[str, Any]:
    """What else ``apply_chat_template`` is given; empty where nothing is asked. Raises InvalidRequest."""
    options: dict[str, Any] = {}
    if chat.tools and chat.tool_choice is not ToolChoice.NONE:
        options["tools"] = [_template_tool(tool) for tool in chat.tools]
    if options or any(message.tool_calls or message.role == "tool" for message in chat.messages):
        options["native_tools"] = style.native_tools
    if chat.template_values:
        check_count("template_values", len(chat.template_values), MAX_VALUES_CHARS)
        values = json_object("template_values", chat.template_values)
        for name in RESERVED_VALUES:
            if name in values:
                raise InvalidRequest(f"template_values.{name}", "has a field of its own")
        options["values"] = values
    if chat.reasoning_effort:
        options["values"] = _with_effort(chat.reasoning_effort, options.get("values", {}), style)
    if chat.continue_final_message:
        if chat.messages[-1].role != "assistant" or chat.messages[-1].tool_calls:
            raise InvalidRequest("continue_final_message", "needs a last message of the assistant, without calls")
        options["continue_final_message"] = True
    if chat.no_generation_prompt:
        options["add_generation_prompt"] = False
    return options


def _with_effort(effort: str, values: Mapping[str, Any], style: AnswerStyle) -> dict[str, Any]:
    """Values for the template, with how much the model is to think."""
    check_name(EFFORT, effort)
    if values.get(EFFORT, effort) != effort:
        raise InvalidRequest(EFFORT, f"differs from template_values.{EFFORT}; give one of them")
    if style.takes_effort:
        return {**values, EFFORT: effort}
    if effort == USUAL_EFFORT or (effort == NONE and not style.reasoning):
        return dict(values)
    raise InvalidRequest(EFFORT, "is not supported: this model's chat template does not take it")


def _template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json_object("", tool.parameters) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# -- how the answer is read ----------------------------------------------------------------------------------------


def answer_format(chat: Chat, style: AnswerStyle, prompt_end: str) -> AnswerFormat | None:
    """How the answer is read; None: its text is the answer. prompt_end: the end of the rendered prompt."""
    calls = style.tool_calls if chat.tools and chat.tool_choice is not ToolChoice.NONE else ""
    if not calls and not style.reasoning:
        return None
    tools = [tool for tool in chat.tools if chat.tool_choice is not ToolChoice.NAMED or tool.name == chat.tool_name]
    return AnswerFormat(
        tool_calls=calls,
        reasoning=style.reasoning,
        reasoning_open=bool(style.reasoning) and _is_open(REASONING_FORMATS[style.reasoning], chat, prompt_end),
        tools=tuple(_callable(tool) for tool in tools) if calls else (),
        one_tool_call=bool(calls) and (chat.one_tool_call or chat.tool_choice is ToolChoice.NAMED),
    )


def _is_open(form: ReasoningFormat, chat: Chat, prompt_end: str) -> bool:
    """Whether the template, or the beginning of the answer that the client gives, has begun the reasoning."""
    if chat.continue_final_message:
        given = chat.messages[-1].content
        return given.rfind(form.begin) > given.rfind(form.end)
    return not chat.no_generation_prompt and prompt_end.rstrip().endswith(form.begin)


def _callable(tool: Tool) -> CallableTool:
    properties = json_object("", tool.parameters).get("properties")
    texts = [key for key, value in properties.items() if is_text(value)] if isinstance(properties, Mapping) else []
    return CallableTool(tool.name, tuple(texts[:MAX_TEXT_ARGUMENTS]))


def check_answer_format(form: AnswerFormat) -> None:
    """Raise InvalidRequest naming the first field of one that a client has made."""
    for name, known in (("tool_calls", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)):
        value = getattr(form, name)
        if value and value not in known:
            raise InvalidRequest(f"answer_format.{name}", f"must be one of {', '.join(known)}, got {quoted(value)}")
    for i, tool in enumerate(form.tools):
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(f"answer_format.tools[{i}].name", "must be 1 to 64 letters, digits, '_', '-' and '.'")


def answer_grammar(
    chat: Chat, form: AnswerFormat, asked: Grammar | None, specials: Mapping[str, int]
) -> Grammar | None:
    """What the answer must be: ``asked``, calls, or both; None: anything. specials: ids of the markers that are special
    tokens. Raises InvalidRequest."""

    def literal(text: str) -> str:
        return f"<[{specials[text]}]>" if text in specials else literal_text(text)

    thinking = Thinking(REASONING_FORMATS[form.reasoning], form.reasoning_open) if form.reasoning else None
    must = form.tool_calls and chat.tool_choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)
    strict = form.tool_calls and any(tool.strict for tool in chat.tools)
    if not must and not strict and (asked is None or not form.tool_calls):
        if asked is None or thinking is None or asked.kind is GrammarKind.EBNF:
            return asked
        return thinking_grammar(asked, literal, thinking)
    schemas = [
        ToolSchema(tool.name, _argument_schema(tool) if must or tool.strict else "")
        for tool in chat.tools
        if chat.tool_choice is not ToolChoice.NAMED or tool.name == chat.tool_name
    ]
    return call_grammar(
        TOOL_FORMATS[form.tool_calls],
        schemas,
        literal,
        calls=Calls.SOME if must else Calls.FREE if asked is None else Calls.OR_BODY,
        one=form.one_tool_call,
        body=asked,
        thinking=thinking,
    )


def enforced_schemas(chat: Chat) -> Iterator[tuple[int, Grammar]]:
    """Place and schema of the tools whose arguments must fit."""
    must = chat.tool_choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)
    for i, tool in enumerate(chat.tools):
        if (must or tool.strict) and (chat.tool_choice is not ToolChoice.NAMED or tool.name == chat.tool_name):
            yield i, Grammar(GrammarKind.JSON_SCHEMA, _argument_schema(tool))


def _argument_schema(tool: Tool) -> str:
    return tool.parameters or '{"type": "object", "properties": {}, "additionalProperties": false}'


def markers(form: AnswerFormat) -> Collection[str]:
    """Texts that must not be left out of the answer's text, even where they are special tokens."""
    calls = TOOL_FORMATS[form.tool_calls].markers if form.tool_calls else ()
    thought = REASONING_FORMATS[form.reasoning] if form.reasoning else None
    return (*calls, *((thought.begin, thought.end) if thought else ()))
