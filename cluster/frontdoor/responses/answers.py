"""The shapes of answers of the Responses API, as the OpenAPI document tells them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict  # before Python 3.12 pydantic cannot read typing's own

from cluster.frontdoor.openai_answers import Told, described

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


@described
class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    """The kind of the part."""
    text: str
    """The text."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[Any]
    """Always empty."""


@described
class OutputMessage(TypedDict):
    """What the model said."""

    type: Literal["message"]
    """The kind of the item."""
    id: str
    """The item's id."""
    status: ItemStatus
    """How far it is; incomplete when the answer was cut there."""
    role: Literal["assistant"]
    """Always assistant."""
    content: list[OutputText]
    """The text, in one part."""


@described
class OutputThought(TypedDict):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    """The kind of the part."""
    text: str
    """The text."""


@described
class OutputReasoning(TypedDict):
    """What the model thought before it spoke."""

    type: Literal["reasoning"]
    """The kind of the item."""
    id: str
    """The item's id."""
    status: ItemStatus
    """How far it is; incomplete when the answer was cut there."""
    summary: list[Any]
    """Always empty: the thought is told as it is."""
    content: list[OutputThought]
    """The thought, in one part."""


@described
class OutputCall(TypedDict):
    """A call of a tool."""

    type: Literal["function_call"]
    """The kind of the item."""
    id: str
    """The item's id."""
    call_id: str
    """Names the call, for the item with what the tool says."""
    name: str
    """The tool."""
    arguments: str
    """Its arguments, a JSON object as text."""
    status: ItemStatus
    """How far it is; incomplete when the answer was cut there."""


@described
class ResponseProblem(TypedDict):
    """Why an answer failed."""

    code: str
    """server_error, or rate_limit_exceeded when there was no room."""
    message: str
    """What went wrong, in words."""


@described
class IncompleteDetails(TypedDict):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]
    """The limit, or the end of the context."""


@described
class InputDetails(TypedDict):
    """Where the input's tokens came from."""

    cached_tokens: int
    """Tokens that were found in a prefix cache."""


@described
class OutputDetails(TypedDict):
    """What the output's tokens were for."""

    reasoning_tokens: int
    """Tokens of the thought, when it is tokenized by itself."""


@described
class ResponseUsage(TypedDict):
    """Tokens of an answer."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputDetails
    """How many of them were cached."""
    output_tokens: int
    """Tokens that were generated."""
    output_tokens_details: OutputDetails
    """How many of them were thought."""
    total_tokens: int
    """Both together."""


@described
class Response(TypedDict):
    """An answer of the Responses API, as far as it is made."""

    id: str
    """Its id, which is the request's too."""
    object: Literal["response"]
    """The kind of this object."""
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None
    """When it was complete."""
    status: Status
    """How far it is."""
    background: bool
    """Whether it is made while nobody waits."""
    error: ResponseProblem | None
    """Why it failed."""
    incomplete_details: IncompleteDetails | None
    """Why it is incomplete."""
    instructions: str | None
    """As the request says."""
    max_output_tokens: int | None
    """As the request says."""
    metadata: dict[str, str]
    """As the request says."""
    model: str
    """The model that is served."""
    output: list[OutputReasoning | OutputMessage | OutputCall]
    """What the model thought, said and called, in this order."""
    parallel_tool_calls: bool
    """As the request says."""
    previous_response_id: str | None
    """As the request says."""
    store: bool
    """As the request says."""
    frequency_penalty: float
    """As the request says."""
    presence_penalty: float
    """As the request says."""
    temperature: float
    """As the request says."""
    text: dict[str, Any]
    """As the request says."""
    tool_choice: str | dict[str, str]
    """As the request says."""
    tools: list[dict[str, Any]]
    """As the request says."""
    top_p: float
    """As the request says."""
    truncation: Literal["disabled"]
    """Always disabled: what does not fit is refused."""
    usage: ResponseUsage | None
    """Tokens, when it is over."""
    paceline: Told | None
    """What the API has no place for, when it is over."""


@described
class DeletedResponse(TypedDict):
    """An answer that is kept no more."""

    id: str
    """Its id."""
    object: Literal["response"]
    """The kind of what was deleted."""
    deleted: Literal[True]
    """Always true."""


@described
class InputItems(TypedDict):
    """The input of an answer."""

    object: Literal["list"]
    """The kind of this object."""
    data: list[dict[str, Any]]
    """The items, in the order that was asked for."""
    first_id: str | None
    """Id of the first item here."""
    last_id: str | None
    """Id of the last item here."""
    has_more: bool
    """Whether there are more after the last one."""
