"""The shapes of answers of the Messages API, as the OpenAPI document tells them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # before Python 3.12 pydantic cannot read typing's own

from cluster.frontdoor.openai_answers import Told, described

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


@described
class AnswerText(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    """The kind of the block."""
    text: str
    """The text."""


@described
class AnswerThinking(TypedDict):
    """What the model thought before it spoke."""

    type: Literal["thinking"]
    """The kind of the block."""
    thinking: str
    """The thought."""
    signature: Literal[""]
    """Always empty: thoughts are not signed."""


@described
class AnswerToolUse(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    """The kind of the block."""
    id: str
    """Names the call, for the block with what the tool says."""
    name: str
    """The tool."""
    input: dict[str, Any]
    """Its arguments; where the call was cut, those that are whole."""


@described
class MessageUsage(TypedDict):
    """Tokens of an answer."""

    input_tokens: int
    """Tokens of the prompt that were in no prefix cache."""
    cache_read_input_tokens: int
    """Tokens of the prompt that were."""
    cache_creation_input_tokens: int
    """Always 0: what is cached costs nothing."""
    output_tokens: int
    """Tokens that were generated."""


@described
class AnswerMessage(TypedDict):
    """Answer of ``/v1/messages``."""

    id: str
    """The request's id."""
    type: Literal["message"]
    """The kind of this object."""
    role: Literal["assistant"]
    """Always assistant."""
    model: str
    """The model that is served."""
    content: list[AnswerThinking | AnswerText | AnswerToolUse]
    """What the model thought, said and called, in this order."""
    stop_reason: StopReason | None
    """Why it ended. Null while it goes on."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    usage: MessageUsage
    """Tokens of prompt and answer."""
    paceline: Told
    """What Anthropic's shape has no place for."""


@described
class TokenCount(TypedDict):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
    """Tokens of the prompt, those of the chat template included."""


@described
class MessageProblem(TypedDict):
    """An error in Anthropic's shape."""

    type: str
    """The kind of the error."""
    message: str
    """What is wrong, in words; it begins with the field."""


@described
class MessageError(TypedDict):
    """Answer of every request of the Messages API that fails."""

    type: Literal["error"]
    """The kind of this object."""
    error: MessageProblem
    """The error."""
