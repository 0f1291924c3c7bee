"""The shapes of answers, as the OpenAPI document tells them: OpenAI's, and what is told beyond them."""

from __future__ import annotations

from typing import (
    Any,
    Literal,
    NotRequired,  # before Python 3.12 pydantic cannot read typing's own
)

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from paceline.results import HandoffBytes, ServedBy, SpeculationStats, Timing

FinishReason = Literal["stop", "length", "abort", "tool_calls"]

described = with_config(ConfigDict(use_attribute_docstrings=True))  # the string under a field is its description


@described
class PromptDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Tokens of the prompt that were found in a prefix cache."""


@described
class Usage(TypedDict):
    """Tokens of all choices; the prompt counts once."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens that were generated, of all choices."""
    total_tokens: int
    """Tokens of the prompt and of all choices."""
    prompt_tokens_details: PromptDetails
    """How many of the prompt's tokens were cached."""


@described
class Details(TypedDict):
    """What OpenAI's shape has no place for, of the first choice; the token ids are those of every choice."""

    speculation: SpeculationStats
    """What was drafted and accepted."""
    timing: Timing
    """How long it took."""
    nodes: ServedBy
    """The nodes that served it."""
    handoff: HandoffBytes
    """Bytes that crossed from the prefill to the decode node."""
    seed: int
    """The seed of the first choice: the same request with it gives this choice again."""
    token_ids: list[list[int]]
    """Token ids of every choice."""


@described
class CompletionChoice(TypedDict):
    """One choice of a completion."""

    index: int
    """Which of the n choices."""
    text: str
    """The text."""
    logprobs: dict[str, Any] | None
    """Log-probabilities in OpenAI's shape, when the request asks for them."""
    finish_reason: FinishReason
    """Why the choice ended: a stop text or token, the length, a cancellation, or calls of tools."""


@described
class Completion(TypedDict):
    """Answer of ``/v1/completions``."""

    id: str
    """The request's id."""
    object: Literal["text_completion"]
    """The kind of this object."""
    created: int
    """Unix time in seconds."""
    model: str
    """The model that is served."""
    choices: list[CompletionChoice]
    """All choices, by index."""
    usage: Usage
    """Tokens of prompt and answer."""
    paceline: Details
    """What OpenAI's shape has no place for."""


@described
class CalledTool(TypedDict):
    """What is called."""

    name: str
    """One of the request's tools."""
    arguments: str
    """The arguments, a JSON object as text."""


@described
class Call(TypedDict):
    """A call of a tool."""

    id: str
    """Names the call, for the message that answers it."""
    type: Literal["function"]
    """Always function."""
    function: CalledTool
    """The tool and its arguments."""


@described
class ChatAnswer(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    """Always assistant."""
    content: str | None
    """The text; null when there are calls and no text."""
    reasoning_content: NotRequired[str]
    """What the model thought, when it thought."""
    tool_calls: NotRequired[list[Call]]
    """The calls, when there are any."""


@described
class ChatChoice(TypedDict):
    """One choice of a chat completion."""

    index: int
    """Which of the n choices."""
    message: ChatAnswer
    """The answer."""
    logprobs: dict[str, Any] | None
    """Log-probabilities in OpenAI's shape, when the request asks for them."""
    finish_reason: FinishReason
    """Why the choice ended: a stop text or token, the length, a cancellation, or calls of tools."""


@described
class Chat(TypedDict):
    """Answer of ``/v1/chat/completions``."""

    id: str
    """The request's id."""
    object: Literal["chat.completion"]
    """The kind of this object."""
    created: int
    """Unix time in seconds."""
    model: str
    """The model that is served."""
    choices: list[ChatChoice]
    """All choices, by index."""
    usage: Usage
    """Tokens of prompt and answer."""
    paceline: Details
    """What OpenAI's shape has no place for."""


@described
class Model(TypedDict):
    """The model that is served."""

    id: str
    """The name of the model, as requests may give it."""
    object: Literal["model"]
    """The kind of this object."""
    created: int
    """Always 0."""
    owned_by: str
    """Always paceline."""
    max_model_len: int
    """Tokens of prompt and output that the model takes together."""


@described
class Models(TypedDict):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    """The kind of this object."""
    data: list[Model]
    """The models."""


@described
class NodeCounts(TypedDict):
    """Nodes that the router sees, by role."""

    prefill: int
    """Prefill nodes."""
    decode: int
    """Decode nodes."""


@described
class Health(TypedDict):
    """Answer of ``/health``."""

    status: str
    """ok, or what is missing."""
    model: str
    """The model that is served."""
    nodes: NodeCounts
    """Nodes that the router sees."""


@described
class Problem(TypedDict):
    """An error in OpenAI's shape; ``param`` names the field that is wrong."""

    message: str
    """What is wrong, in words."""
    type: str
    """The kind of the error."""
    param: str | None
    """The field that is wrong, by its path."""
    code: str | None
    """A word for programs."""


@described
class Error(TypedDict):
    """Answer of every request that fails."""

    error: Problem
    """The error."""
