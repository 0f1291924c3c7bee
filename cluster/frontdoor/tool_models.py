"""Tools and calls in bodies of chats, as models, and what they mean."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from cluster.contract.generation import MAX_NAME_CHARS, MAX_TOOLS, Tool, ToolChoice
from cluster.contract.tools import check_values
from cluster.frontdoor.json_models import Ignored, JsonObject, Text, at_most
from paceline.results import ToolCall

Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
# The library's names of fields of tools, and their places in these bodies.
_PLACES = (
    (re.compile(r"^(tools\[\d+\])\.(name|description|parameters|strict)"), r"\1.function.\2"),
    (re.compile(r"^(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)"), r"\1.function.\2"),
    (re.compile(r"^(messages\[\d+\])\.reasoning$"), r"\1.reasoning_content"),
    (re.compile(r"^tool_name$"), "tool_choice.function.name"),
    (re.compile(r"^template_values"), "chat_template_kwargs"),
)


def body_field(field: str) -> str:
    """The place in a body of what the library calls ``field``."""
    for pattern, place in _PLACES:
        field = pattern.sub(place, field)
    return field


class FunctionModel(JsonObject):
    """A function that the model may call."""

    name: Name
    """Its name: letters, digits, `_`, `-` and `.`; at most 64."""
    description: Text | None = None
    """What it does, for the model to read."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema of its arguments, which must be of an object. Without it there are none."""
    strict: bool | None = None
    """Whether arguments that do not fit the schema are impossible. The default is false."""


class ToolModel(JsonObject):
    """What the model may call."""

    type: Literal["function"]
    """The kind of the tool: only functions are supported."""
    function: FunctionModel
    """The function."""


Tools = Annotated[list[ToolModel], Field(fail_fast=True, max_length=MAX_TOOLS), at_most(MAX_TOOLS)]


class NamedFunction(JsonObject):
    """The name of a function."""

    name: Name
    """One of the tools."""


class NamedTool(JsonObject):
    """The tool that must be called."""

    type: Literal["function"]
    """Always function."""
    function: NamedFunction
    """The function."""


def _choice_form(value: Any) -> str | None:
    return "word" if isinstance(value, str) else "tool" if isinstance(value, dict) else None


_WORDS = ("none", "auto", "required")


def _known_word(value: str) -> str:
    if value not in _WORDS:
        raise PydanticCustomError("literal_error", "", {"expected": "'none', 'auto', 'required' or an object"})
    return value


ToolChoiceModel = Annotated[
    Annotated[Text, AfterValidator(_known_word), Field(json_schema_extra={"enum": list(_WORDS)}), Tag("word")]
    | Annotated[NamedTool, Tag("tool")],
    Discriminator(_choice_form, "tool_choice_form", "must be 'none', 'auto', 'required' or an object"),
]


class CalledFunction(JsonObject):
    """The function of a call."""

    name: Name
    """Its name."""
    arguments: Text
    """Its arguments, a JSON object as text."""


class CallModel(JsonObject):
    """A call that the assistant made."""

    id: Name
    """Names the call, for the message that answers it."""
    type: Literal["function"] = "function"
    """Always function."""
    function: CalledFunction
    """What was called."""
    index: Ignored = None


Calls = Annotated[list[CallModel], Field(fail_fast=True, max_length=MAX_TOOLS), at_most(MAX_TOOLS)]


def tool(index: int, model: ToolModel) -> Tool:
    """A tool as the router takes it. Raises InvalidRequest for a schema that is too large."""
    function = model.function
    check_values(f"tools[{index}].function.parameters", function.parameters)
    parameters = "" if function.parameters is None else json.dumps(function.parameters)
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def tool_choice(model: str | NamedTool | None) -> tuple[ToolChoice, str]:
    """The choice, and the name of the tool that must be called."""
    if isinstance(model, NamedTool):
        return ToolChoice.NAMED, model.function.name
    return ToolChoice(model or "auto"), ""


def tool_call(model: CallModel) -> ToolCall:
    """A call as the router takes it."""
    return ToolCall(model.id, model.function.name, model.function.arguments)
