"""The shapes of answers, as the OpenAPI document tells them: OpenAI's, and what is told beyond them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # before Python 3.12 pydantic cannot read typing's own

from paceline.results import HandoffBytes, ServedBy, SpeculationStats, Timing

FinishReason = Literal["stop", "length", "abort"]


class PromptDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of all choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Details(TypedDict):
    """What OpenAI's shape has no place for, of the first choice; the token ids are those of every choice."""

    speculation: SpeculationStats
    timing: Timing
    nodes: ServedBy
    handoff: HandoffBytes
    seed: int
    token_ids: list[list[int]]


class CompletionChoice(TypedDict):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class Completion(TypedDict):
    """Answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    paceline: Details


class ChatAnswer(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One choice of a chat completion."""

    index: int
    message: ChatAnswer
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class Chat(TypedDict):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    paceline: Details


class Model(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class NodeCounts(TypedDict):
    """Nodes that the router sees, by role."""

    prefill: int
    decode: int


class Health(TypedDict):
    """Answer of ``/health``."""

    status: str
    model: str
    nodes: NodeCounts


class Problem(TypedDict):
    """An error in OpenAI's shape; ``param`` names the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Answer of every request that fails."""

    error: Problem
