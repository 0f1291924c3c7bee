"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as models.

Fields and meanings are those of Anthropic's Messages API. What a part of the API that is not offered would need
(images, documents, tools that a server runs, a budget for thinking) is refused by its name. What fields mean together
is in `cluster.frontdoor.messages.parse`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.contract.generation import MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS
from cluster.frontdoor.json_models import Ignored, JsonObject, Neutral, Text
from cluster.frontdoor.openai_fields import Unsupported
from cluster.frontdoor.openai_requests import StopText
from cluster.frontdoor.own_fields import CallId, OwnFields, ToolName, list_of, text_or_list
from paceline.request import INT32_MAX, MAX_STOP_STRINGS

# -- messages ----------------------------------------------------------------------------------------------------------


class TextBlock(JsonObject):
    """Text of a turn. The texts of all blocks are put together."""

    type: Literal["text"]
    """The kind of the block."""
    text: Text
    """The text."""
    citations: Ignored = None
    cache_control: Ignored = None


Texts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextBlock], *list_of(MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list, "text_form", "must be a string or a list of text blocks"),
]


class ToolUseBlock(JsonObject):
    """A call of a tool, which the assistant made."""

    type: Literal["tool_use"]
    """The kind of the block."""
    id: CallId
    """Names the call, for the block with what the tool said."""
    name: ToolName
    """The tool."""
    input: dict[str, Any]
    """Its arguments."""
    caller: Ignored = None
    cache_control: Ignored = None


class ToolResultBlock(JsonObject):
    """What a tool said to a call, in a user's turn."""

    type: Literal["tool_result"]
    """The kind of the block."""
    tool_use_id: CallId
    """The call, which must be in a turn before this one."""
    content: Texts | None = None
    """The text, or its blocks."""
    is_error: Annotated[Any, Field(description="This field is ignored: chat templates have no place for it.")] = None
    cache_control: Ignored = None


class ThinkingBlock(JsonObject):
    """What the assistant thought before it spoke."""

    type: Literal["thinking"]
    """The kind of the block."""
    thinking: Text
    """The thought."""
    signature: Ignored = None


_KINDS = ("text", "tool_use", "tool_result", "thinking")


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"a {kind}" if kind in _KINDS else None


Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ToolUseBlock, Tag("a tool_use")]
    | Annotated[ToolResultBlock, Tag("a tool_result")]
    | Annotated[ThinkingBlock, Tag("a thinking")],
    Discriminator(_block_kind, "block_kind", f"must be a block whose type is one of {', '.join(_KINDS)}"),
]
Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Block], *list_of(MAX_MESSAGES), Tag("list")],
    Discriminator(text_or_list, "content_form", "must be a string or a list of blocks"),
]


class Message(JsonObject):
    """One turn."""

    role: Literal["user", "assistant"]
    """Who speaks. An assistant's turn at the end is the beginning of the answer."""
    content: Content
    """The text of the turn, or its blocks."""


# -- other parts -------------------------------------------------------------------------------------------------------


class ClientTool(JsonObject):
    """A tool that the client runs. Tools that a server runs are not supported."""

    type: Literal["custom"] | None = None
    """The kind of the tool, which may be left out: only custom ones are supported."""
    name: ToolName
    """Its name."""
    description: Text | None = None
    """What it does, for the model."""
    input_schema: dict[str, Any]
    """A JSON Schema of its arguments."""
    strict: bool | None = None
    """Arguments that do not fit the schema are impossible, also where the model is free to call. The default is
    false."""
    defer_loading: Annotated[Any, Neutral(False)] = None
    allowed_callers: Annotated[Any, Neutral(["direct"])] = None
    input_examples: Annotated[Any, Neutral([])] = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ToolChoice(JsonObject):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: as it likes, which is the default. any: one or more. tool: the one of ``name``."""
    name: ToolName | None = None
    """The tool that is to be called, with the type tool alone."""
    disable_parallel_tool_use: bool | None = None
    """At most one call in an answer. The default is false."""


class Thinking(JsonObject):
    """How the model is to think. It thinks as its chat template lets it, without a budget."""

    type: Literal["disabled", "adaptive"]
    """Both leave it to the model."""
    display: Ignored = None


class JsonFormat(JsonObject):
    """The form of the answer."""

    type: Literal["json_schema"]
    """The kind of the form."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """A JSON Schema, which the answer's text fits."""


class OutputConfig(JsonObject):
    """What the answer is to be."""

    format: JsonFormat | None = None
    """Its form. The default is any text."""
    effort: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    """How much the model is to think, for chat templates that take it; high is as usual. Others refuse every value but
    medium and high."""


# -- bodies ------------------------------------------------------------------------------------------------------------


class CountTokensRequest(JsonObject):
    """A body of ``POST /v1/messages/count_tokens``."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    messages: Annotated[list[Message], Field(min_length=1), *list_of(MAX_MESSAGES)]
    """The turns so far, in their order."""
    system: Texts | None = None
    """A system turn before them: a text, or blocks, which are put together."""
    tools: Annotated[list[ClientTool], *list_of(MAX_TOOLS)] | None = None
    """What the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it calls tools."""
    thinking: Thinking | None = None
    """How the model is to think."""
    output_config: OutputConfig | None = None
    """What the answer is to be."""
    cache_salt: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    """The tenant. It does not change the count."""
    cache_control: Ignored = None
    speed: Ignored = None


class MessageRequest(OwnFields, CountTokensRequest):
    """A body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    """Tokens to generate at most."""
    stop_sequences: Annotated[list[StopText], *list_of(MAX_STOP_STRINGS)] | None = None
    """Texts that end the answer. They are not part of it; ``stop_sequence`` of the answer says which one it was."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """Randomness of sampling. 0 takes the likeliest token; 1, the default, is the model's own distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the fewest tokens that have this probability together. The default, 1, keeps all."""
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Sample from this many likeliest tokens. 0, the default, keeps all."""
    container: Unsupported = None
    mcp_servers: Annotated[Any, Neutral([])] = None
    context_management: Unsupported = None

    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
