"""The bodies that OpenAI's endpoints take, as models. The OpenAPI document is made of them.

Fields and meanings are OpenAI's (completions, chat completions); the sampling fields that OpenAI does not have are
vLLM's. A field that would change the result and is not supported is refused by name, as is a field nobody knows; what
cannot change it (``user``, ``metadata``) is ignored. What fields mean together is in `cluster.frontdoor.openai_parse`.
What only the deployment knows, such as its vocabulary, its context and its drafters, is checked by the router.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from cluster.contract.generation import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PRIORITY, MAX_STOP_TOKEN_IDS
from cluster.frontdoor.json_models import INT64_MIN, UINT64_MAX, JsonObject, Neutral, Text, at_most
from paceline.request import INT32_MAX, MAX_BIAS, MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, RANGES
from paceline.speculation import TreeKind

ALL_TOP_K = -1  # vLLM's other word for 0


def _range(name: str) -> FieldInfo:
    """The library's bounds of a field."""
    low, high = RANGES[name]
    made: FieldInfo = Field(ge=low, le=high)
    return made


def _list(most: int | None = None, *, least: int | None = None) -> FieldInfo:
    """Bounds of a list, which is not read beyond its first wrong item."""
    made: FieldInfo = Field(min_length=least, max_length=most, fail_fast=True)
    return made


# -- parts of bodies -----------------------------------------------------------------------------------------------

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], _list(least=1)]
PromptText = Annotated[Text, Field(min_length=1)]


def _prompt_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "token_id_lists" if isinstance(first, list) else "token_ids"


def _one_prompt(value: Any) -> Any:
    if len(value) > 1:
        raise PydanticCustomError("several_prompts", "one prompt per request; a list of several is not supported")
    return value


_ONE = (_list(1, least=1), BeforeValidator(_one_prompt))
Prompt = Annotated[
    Annotated[PromptText, Tag("text")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[list[PromptText], *_ONE, Tag("texts")]
    | Annotated[list[TokenIds], *_ONE, Tag("token_id_lists")],
    Discriminator(_prompt_form, "prompt_form", "must be a string or a list of token ids"),
]


def _text_or_list(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText], _list(MAX_STOP_STRINGS), Tag("list")],
    Discriminator(_text_or_list, "stop_form", "must be a string or a list of strings"),
]


def _token_id_keys(value: Any) -> Any:
    for key in value if isinstance(value, dict) else ():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise PydanticCustomError("bias_key", "key {key} is not a token id", {"key": repr(key[:40])})
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],  # JSON knows no keys but strings
    Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    BeforeValidator(_token_id_keys),
    at_most(MAX_LOGIT_BIAS),
]


_TREES = ["", *(kind.value for kind in TreeKind)]  # empty: the deployment's own


def _known_tree(value: str) -> str:
    if value not in _TREES:
        *others, last = map(repr, _TREES)
        raise PydanticCustomError("literal_error", "", {"expected": f"{', '.join(others)} or {last}"})
    return value


Tree = Annotated[Text, AfterValidator(_known_tree), Field(json_schema_extra={"enum": list(_TREES)})]
Ignored = Annotated[Any, Field(description="This field is ignored: it cannot change the result.")]
Unsupported = Annotated[Any, Neutral()]


class TextPart(JsonObject):
    """A part of a message's content. The texts of all parts are put together."""

    type: Literal["text"]
    """The kind of the part: only text is supported."""
    text: Text
    """The text."""


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], _list(MAX_MESSAGES), at_most(MAX_MESSAGES), Tag("list")],
    Discriminator(_text_or_list, "content_form", "must be a string or a list of text parts"),
]


class Message(JsonObject):
    """One turn of a chat. ``developer`` means ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    """Who speaks."""
    content: Content
    """The text of the turn, or its parts, which are put together."""
    # Clients send an earlier answer back with these.
    tool_calls: Annotated[Any, Neutral([])] = None
    annotations: Annotated[Any, Neutral([])] = None
    name: Unsupported = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None


class StreamOptions(JsonObject):
    """How a stream is sent."""

    include_usage: bool | None = None
    """Send the usage in one more event at the end."""
    include_obfuscation: bool | None = None
    """This field is ignored."""


class Speculation(JsonObject):
    """How tokens are drafted for this request, within what the deployment gives. It never changes the text."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Draft tokens on a path (K), at most the deployment's; 0 turns speculation off."""
    tree_width: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Candidates per expanded node, at most the deployment's; 1 makes a chain."""
    drafter: Text | None = None
    """One of the deployment's drafters. Without it, or empty, the deployment's own."""
    tree: Tree | None = None
    """Shape of the draft: chain, static or dynamic. Without it, or empty, the deployment's own."""


# -- bodies --------------------------------------------------------------------------------------------------------


class GenerationBody(JsonObject):
    """What both endpoints take."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made; `data: [DONE]` is the last. The default is false."""
    stream_options: StreamOptions | None = None
    """How the stream is sent. It only goes with stream."""
    n: Annotated[int, _range("n")] | None = None
    """Choices to make, each with a seed that is derived from the request's. The default is 1."""
    stop: Stop | None = None
    """Texts that end the answer and are not part of it."""
    seed: Annotated[int, _range("seed")] | None = None
    """The same request with the same seed gives the same text. Without it the router draws a seed and tells it."""
    max_tokens: Annotated[int, _range("max_tokens")] | None = None
    """Tokens to generate at most. The default is 16 for completions, 1,024 for chats. The context bounds it."""
    temperature: Annotated[float, _range("temperature")] | None = None
    """Randomness of sampling. 0 takes the likeliest token; 1, the default, is the model's own distribution."""
    presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
    """Subtracted from the logit of every token that was generated. The default is 0."""
    frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
    """Subtracted from a token's logit as often as the token was generated. The default is 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the fewest tokens that have this probability together. The default, 1, keeps all."""
    logit_bias: LogitBias | None = None
    """Numbers to add to the logits of token ids. The keys are token ids as strings."""
    top_k: Annotated[int, Field(ge=ALL_TOP_K, le=INT32_MAX)] | None = None
    """Sample from this many likeliest tokens. 0, the default, and -1 keep all."""
    min_p: Annotated[float, _range("min_p")] | None = None
    """Drop tokens less likely than this share of the likeliest one's probability. The default is 0."""
    repetition_penalty: Annotated[float, _range("repetition_penalty")] | None = None
    """Divides positive and multiplies negative logits of tokens of prompt and output. The default, 1, is none."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Tokens before which no end-of-sequence or stop token is taken; at most max_tokens. The default is 0."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-sequence token. The default is false."""
    stop_token_ids: Annotated[list[TokenId], _list(MAX_STOP_TOKEN_IDS)] | None = None
    """Token ids that end the answer, besides the model's own end-of-sequence tokens."""
    speculation: Speculation | None = None
    """How tokens are drafted for this request."""
    cache_salt: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    """The tenant: scope of the prefix cache and of the router's fairness."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """While requests of a tenant wait, the one of the higher priority goes first. The default is 0."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    parallel_tool_calls: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None


class CompletionRequest(GenerationBody):
    """A body of ``/v1/completions``."""

    prompt: Prompt
    """A text or token ids, or a list with one of them."""
    logprobs: Annotated[int, _range("top_logprobs")] | None = None
    """Alternatives whose log-probabilities are told. 0 tells the chosen token's alone; without it, none are told."""
    best_of: Annotated[int, Field(ge=INT64_MIN, le=UINT64_MAX)] | None = None
    """Only the value of n is supported."""
    echo: Annotated[Any, Neutral(False)] = None
    suffix: Annotated[Any, Neutral("")] = None


class ChatRequest(GenerationBody):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], _list(MAX_MESSAGES, least=1), at_most(MAX_MESSAGES)]
    """The turns so far, in their order."""
    max_completion_tokens: Annotated[int, _range("max_tokens")] | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    """Tell the log-probability of every token. The default is false."""
    top_logprobs: Annotated[int, _range("top_logprobs")] | None = None
    """Alternatives whose log-probabilities are told for every token. It only goes with logprobs."""
    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None  # of no tools
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
