"""The body of ``POST /v1/responses`` and the items of a conversation, as models.

Fields and meanings are those of OpenAI's Responses API. What a part of the API that is not offered would need (built-in
tools, images, stored prompts) is refused by its name. What fields mean together is in
`cluster.frontdoor.responses.parse`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.contract.generation import MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS
from cluster.frontdoor.json_models import Ignored, JsonObject, Neutral, Text, at_most
from cluster.frontdoor.openai_fields import Unsupported
from cluster.frontdoor.openai_requests import SamplingFields
from cluster.frontdoor.own_fields import CallId, OwnFields, ToolName, list_of, text_or_list
from paceline.request import INT32_MAX

MAX_METADATA = 64  # entries
MAX_ID = 256  # characters


# -- items -----------------------------------------------------------------------------------------------------------


class Part(JsonObject):
    """A part of a message. The texts of all parts are put together."""

    type: Literal["input_text", "output_text"]
    """The kind of the part: only text is supported."""
    text: Text
    """The text."""
    annotations: Ignored = None
    logprobs: Ignored = None


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Part], *list_of(MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list, "content_form", "must be a string or a list of text parts"),
]


class MessageItem(JsonObject):
    """One turn. ``developer`` means ``system``. An answer's message may be sent back as it is."""

    type: Literal["message"] | None = None
    """The kind of the item, which may be left out."""
    role: Literal["user", "assistant", "system", "developer"]
    """Who speaks."""
    content: Content
    """The text of the turn, or its parts, which are put together."""
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(JsonObject):
    """A call of a tool, which the model made."""

    type: Literal["function_call"]
    """The kind of the item."""
    call_id: CallId
    """Names the call, for the item with what the tool said."""
    name: ToolName
    """The tool."""
    arguments: Text
    """Its arguments, a JSON object as text."""
    id: Ignored = None
    status: Ignored = None
    namespace: Unsupported = None


class CallOutputItem(JsonObject):
    """What a tool said to a call."""

    type: Literal["function_call_output"]
    """The kind of the item."""
    call_id: CallId
    """The call, which must be an item before this one."""
    output: Content
    """The text, or its parts."""
    id: Ignored = None
    status: Ignored = None


class ReasoningPart(JsonObject):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    """The kind of the part."""
    text: Text
    """The text."""


class ReasoningItem(JsonObject):
    """What the model thought before the message or the calls that follow."""

    type: Literal["reasoning"]
    """The kind of the item."""
    content: Annotated[list[ReasoningPart], *list_of(MAX_MESSAGES)] | None = None
    """The thought, in parts, which are put together."""
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None
    encrypted_content: Unsupported = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    """A message may say no type."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return f"a {kind or _KINDS[0]}" if kind in (None, *_KINDS) else None


Item = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[CallOutputItem, Tag("a function_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(_item_kind, "item_kind", f"must be an item whose type is one of {', '.join(_KINDS)}"),
]
Input = Annotated[
    Annotated[Text, Field(min_length=1), Tag("text")]
    | Annotated[
        list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES), Tag("list")
    ],
    Discriminator(text_or_list, "input_form", "must be a string or a list of items"),
]

# -- other parts -------------------------------------------------------------------------------------------------------


class FunctionTool(JsonObject):
    """A tool that the client runs. Tools that a server runs are not supported."""

    type: Literal["function"]
    """The kind of the tool: only functions are supported."""
    name: ToolName
    """Its name."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema of its arguments. Without it the tool takes none."""
    strict: bool | None = None
    """Arguments that do not fit the schema are impossible, also where the model is free to call. The default is
    false."""
    defer_loading: Annotated[Any, Neutral(False)] = None
    output_schema: Unsupported = None


class NamedTool(JsonObject):
    """The tool that is to be called."""

    type: Literal["function"]
    """The kind of the tool: only functions are supported."""
    name: ToolName
    """Its name, which is one of ``tools``."""


def _choice_form(value: Any) -> str | None:
    return "word" if isinstance(value, str) else "a tool" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("a tool")],
    Discriminator(_choice_form, "choice_form", "must be a string or an object"),
]


class TextFormat(JsonObject):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or what fits ``schema``."""
    name: Annotated[Text, Field(max_length=MAX_ID)] | None = None
    """A name of the schema, which is told back."""
    description: Text | None = None
    """What the schema is for, which is told back and not shown to the model."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """A JSON Schema, with json_schema alone."""
    strict: bool | None = None
    """This field is ignored: the answer always fits the schema."""


class TextOptions(JsonObject):
    """What the answer's text is to be."""

    format: TextFormat | None = None
    """Its form. The default is any text."""
    verbosity: Annotated[Any, Neutral("medium")] = None


class Reasoning(JsonObject):
    """How the model is to think."""

    effort: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    """How much, for chat templates that take it. Others refuse every value but medium, and none where the model does
    not think."""
    summary: Annotated[Any, Neutral("auto")] = None
    generate_summary: Annotated[Any, Neutral("auto")] = None


class ResponseStreamOptions(JsonObject):
    """How a stream is sent."""

    include_obfuscation: bool | None = None
    """This field is ignored."""


# -- the body ----------------------------------------------------------------------------------------------------------


class ResponseRequest(OwnFields, SamplingFields):
    """A body of ``POST /v1/responses``."""

    input: Input
    """A text, which is the user's, or the items of a conversation."""
    instructions: Text | None = None
    """A system turn before everything else. It is not part of what ``previous_response_id`` brings back."""
    previous_response_id: Annotated[Text, Field(max_length=MAX_ID)] | None = None
    """An answer that this router keeps: its input and output come before this input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Tokens to generate at most, thought and calls included. Without it, what the context leaves, at most 1,024."""
    tools: Annotated[list[FunctionTool], *list_of(MAX_TOOLS)] | None = None
    """What the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it calls tools: none, auto (the default), required, or the one that is named."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. The default is true."""
    text: TextOptions | None = None
    """The form of the answer."""
    store: bool | None = None
    """Keep the answer in the router's memory, for ``GET`` and ``previous_response_id``. The default is true."""
    background: bool | None = None
    """Answer at once and go on generating, for ``GET`` to ask. It needs ``store`` and goes without ``stream``."""
    metadata: Annotated[dict[str, Text], at_most(MAX_METADATA)] | None = None
    """Texts that are told back with the answer."""
    reasoning: Reasoning | None = None
    """How the model is to think."""
    stream_options: ResponseStreamOptions | None = None
    """How a stream is sent."""
    truncation: Annotated[Any, Neutral("disabled")] = None
    include: Annotated[Any, Neutral([])] = None
    top_logprobs: Annotated[Any, Neutral(0)] = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Annotated[Any, Neutral([])] = None
    moderation: Unsupported = None

    user: Ignored = None
    service_tier: Ignored = None
    max_tool_calls: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
