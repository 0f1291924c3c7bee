"""The shapes of answers, as the OpenAPI document tells them: OpenAI's, and what is told beyond them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from paceline.results import HandoffBytes, ServedBy, SpeculationStats, Timing

FinishReason = Literal["stop", "length", "abort", "tool_calls"]

described = with_config(ConfigDict(use_attribute_docstrings=True))  # the string under a field is its description


@described
class PromptLogprob(TypedDict):
    """A token that could stand at a place of the prompt."""

    logprob: float
    """Its log-probability."""
    rank: int | None
    """1 for the likeliest token; null for the prompt's own where it is not among those that were asked for."""
    decoded_token: str
    """Its text."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id, the prompt's own first; null for the first token


@described
class PromptDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Tokens of the prompt that were found in a prefix cache."""


@described
class CompletionDetails(TypedDict):
    """What the generated tokens were."""

    reasoning_tokens: int
    """Tokens of the reasoning, its markers counted."""
    accepted_prediction_tokens: int
    """Tokens that were drafted from the request's prediction and are in the answer."""
    rejected_prediction_tokens: int
    """Tokens that were drafted from the request's prediction and are not. They are not among completion_tokens."""


@described
class Usage(TypedDict):
    """Tokens of all choices; each prompt counts once."""

    prompt_tokens: int
    """Tokens of the prompt, or of all prompts."""
    completion_tokens: int
    """Tokens that were generated, of all choices."""
    total_tokens: int
    """Tokens of the prompt and of all choices."""
    prompt_tokens_details: PromptDetails
    """How many of the prompt's tokens were cached."""
    completion_tokens_details: CompletionDetails
    """How many of the generated tokens were reasoning. What was drafted and accepted stands in `paceline`."""


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
class Told(TypedDict):
    """What the API has no place for."""

    speculation: SpeculationStats
    """What was drafted and accepted."""
    timing: Timing
    """How long it took."""
    nodes: ServedBy
    """The nodes that served it."""
    handoff: HandoffBytes
    """Bytes that crossed from the prefill to the decode node."""
    seed: int
    """The seed: the same request with it gives this answer again."""


@described
class CompletionChoice(TypedDict):
    """One choice of a completion."""

    index: int
    """Which of the n choices."""
    text: str
    """The text."""
    logprobs: dict[str, Any] | None
    """Log-probabilities in OpenAI's shape, when the request asks for them. With echo those of the prompt come first."""
    finish_reason: FinishReason
    """Why the choice ended: a stop text or token, the length, a cancellation, or calls of tools."""
    stop_reason: str | int | None
    """Which of the request's stop texts or stop token ids ended it; null where none of them did."""
    matched_stop: str | int | None
    """The same, and the model's own end-of-sequence token where that ended it."""
    prompt_logprobs: PromptLogprobs | None
    """Log-probabilities of the prompt's tokens, when the request asks for them."""
    token_ids: list[int] | None
    """Its token ids, with `return_token_ids`."""
    prompt_token_ids: list[int] | None
    """The prompt's token ids, with `return_token_ids`."""


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
    system_fingerprint: str | None
    """Names the model, its weights and the kernels: with another one, the same request may give another text."""
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
    stop_reason: str | int | None
    """Which of the request's stop texts or stop token ids ended it; null where none of them did."""
    matched_stop: str | int | None
    """The same, and the model's own end-of-sequence token where that ended it."""
    token_ids: list[int] | None
    """Its token ids, with `return_token_ids`."""


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
    system_fingerprint: str | None
    """Names the model, its weights and the kernels: with another one, the same request may give another text."""
    choices: list[ChatChoice]
    """All choices, by index."""
    prompt_logprobs: PromptLogprobs | None
    """Log-probabilities of the prompt's tokens, when the request asks for them."""
    usage: Usage
    """Tokens of prompt and answer."""
    paceline: Details
    """What OpenAI's shape has no place for."""
    prompt_token_ids: list[int] | None
    """The prompt's token ids, with `return_token_ids`."""


@described
class Model(TypedDict):
    """The model that is served."""

    id: str
    """The name of the model, as requests may give it."""
    object: Literal["model"]
    """The kind of this object."""
    created: int
    """When the server started, Unix time in seconds."""
    owned_by: str
    """Always paceline."""
    root: str
    """The first of the model's names, which answers have."""
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
    trouble: NotRequired[str]
    """What is wrong though requests are served."""


@described
class Tokens(TypedDict):
    """Answer of ``/tokenize``, in vLLM's shape."""

    count: int
    """How many tokens there are."""
    max_model_len: int
    """Tokens of prompt and output that the model takes together."""
    tokens: list[int]
    """The token ids, special tokens included."""
    token_strs: list[str] | None
    """The text of each token by itself, when the request asks for it."""


@described
class Detokenized(TypedDict):
    """Answer of ``/detokenize``, in vLLM's shape."""

    prompt: str
    """The text of the tokens."""


@described
class Version(TypedDict):
    """Answer of ``/version``."""

    version: str
    """The version of Paceline."""


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
