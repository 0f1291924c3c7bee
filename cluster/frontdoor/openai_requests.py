"""The bodies that OpenAI's endpoints take, as models. The OpenAPI document is made of them.

Fields and meanings are OpenAI's (completions, chat completions); the sampling fields that OpenAI does not have are
vLLM's and SGLang's. `cluster.frontdoor.openai_fields` has those that are ignored and those that are refused; a field
nobody knows is refused too. `cluster.frontdoor.openai_formats` has those that say what the text must be. What fields
mean together is in `cluster.frontdoor.openai_parse`. What only the deployment knows, such as its vocabulary, its
context and its drafters, is checked by the router.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from cluster.contract.generation import CONTROLS, MAX_MESSAGES, MAX_NAME_CHARS, MAX_PRIORITY, MAX_STOP_TOKEN_IDS
from cluster.contract.plan import KEEP_WHAT_FITS
from cluster.frontdoor.json_models import INT64_MIN, UINT64_MAX, Ignored, JsonObject, Neutral, Text, at_most
from cluster.frontdoor.openai_fields import (
    IgnoredFields,
    OnlyFalse,
    OnlyTrue,
    RefusedChatFields,
    RefusedFields,
    Unsupported,
)
from cluster.frontdoor.openai_formats import FormatFields
from cluster.frontdoor.tool_models import Calls, Name, ToolChoiceModel, Tools
from paceline.request import (
    INT32_MAX,
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    RANGES,
)
from paceline.speculation import TreeKind

ALL_TOP_K = -1  # vLLM's other word for 0
MAX_PROMPTS = 128  # of a request


def _range(name: str) -> FieldInfo:
    """The library's bounds of a field."""
    low, high = RANGES[name]
    made: FieldInfo = Field(ge=low, le=high)
    return made


def _list(most: int | None = None, *, least: int | None = None) -> FieldInfo:
    """Bounds of a list, which is not read beyond its first wrong item."""
    made: FieldInfo = Field(min_length=least, max_length=most, fail_fast=True)
    return made


CacheSalt = Annotated[
    Text, Field(max_length=MAX_NAME_CHARS, json_schema_extra={"pattern": f"^[^{CONTROLS}]*$"})
]  # the router says which character is wrong

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


_SEVERAL = (_list(MAX_PROMPTS, least=1), at_most(MAX_PROMPTS))
Prompt = Annotated[
    Annotated[PromptText, Tag("text")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[list[PromptText], *_SEVERAL, Tag("texts")]
    | Annotated[list[TokenIds], *_SEVERAL, Tag("token_id_lists")],
    Discriminator(_prompt_form, "prompt_form", "must be a string or a list of token ids"),
]


def _text_or_list(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


BadWord = Annotated[Text, Field(min_length=1, max_length=MAX_BAD_WORD)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText | None], _list(MAX_STOP_STRINGS), Tag("list")],
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


_AT_LEAST_ONE = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
KeptTokens = Annotated[
    int,
    Field(ge=KEEP_WHAT_FITS, le=INT32_MAX, json_schema_extra={"anyOf": [{"const": KEEP_WHAT_FITS}, _AT_LEAST_ONE]}),
]

Tree = Annotated[Text, AfterValidator(_known_tree), Field(json_schema_extra={"enum": list(_TREES)})]


class TextPart(JsonObject):
    """A part of a message's content. The texts of all parts are put together."""

    type: Literal["text", "input_text", "output_text"]
    """The kind of the part: only text is supported."""
    text: Text
    """The text."""
    annotations: Ignored = None
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], _list(MAX_MESSAGES), at_most(MAX_MESSAGES), Tag("list")],
    Discriminator(_text_or_list, "content_form", "must be a string or a list of text parts"),
]


class Message(JsonObject):
    """One turn of a chat. ``developer`` means ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks."""
    content: Content | None = None
    """The text of the turn, or its parts, which are put together. Only a turn with tool_calls can do without."""
    tool_calls: Calls | None = None
    """The calls that the assistant made."""
    tool_call_id: Name | None = None
    """The call that a tool's turn answers."""
    name: Name | None = None
    """Who speaks, for templates that tell speakers of one role apart."""
    reasoning_content: Text | None = None
    """What the assistant thought before it spoke, for templates that keep it."""
    reasoning: Text | None = None
    """Another name of reasoning_content."""
    # Clients send an earlier answer back with these.
    function_call: Unsupported = None
    refusal: Annotated[Any, Neutral("")] = None
    audio: Unsupported = None
    prefix: OnlyFalse = None
    partial: OnlyFalse = None
    annotations: Ignored = None
    cache_control: Ignored = None
    provider_specific_fields: Ignored = None
    thinking_blocks: Ignored = None


class StreamOptions(JsonObject):
    """How a stream is sent."""

    include_usage: bool | None = None
    """Send the usage in one more event at the end."""
    continuous_usage_stats: bool | None = None
    """With include_usage, send the usage so far in every event."""
    include_obfuscation: Ignored = None


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


class Prediction(JsonObject):
    """What the answer will probably say, e.g. a file that is to be edited (OpenAI's Predicted Outputs)."""

    type: Literal["content"]
    """The kind of the prediction."""
    content: Content
    """The text, or its parts, which are put together. Its words are drafted wherever the answer follows them."""


# -- bodies --------------------------------------------------------------------------------------------------------


class SamplingFields(JsonObject):
    """How tokens are chosen, and which of them end the answer."""

    stop: Stop | None = None
    """Texts that end the answer and are not part of it."""
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
    bad_words: Annotated[list[BadWord], _list(MAX_BAD_WORDS), at_most(MAX_BAD_WORDS)] | None = None
    """Texts that must not come. Each is held back as the tokens that the tokenizer makes of it, with and without a
    space before it."""
    include_stop_str_in_output: bool | None = None
    """The stop text, or the stop token's text, that ended the answer is part of it. The default is false."""
    no_stop_trim: bool | None = None
    """Another name of include_stop_str_in_output."""
    skip_special_tokens: bool | None = None
    """Special tokens add nothing to the text. The default is true."""


class GenerationBody(IgnoredFields, FormatFields, SamplingFields):
    """What both endpoints take."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made; `data: [DONE]` is the last. The default is false."""
    stream_options: StreamOptions | None = None
    """How the stream is sent. It only goes with stream."""
    n: Annotated[int, _range("n")] | None = None
    """Choices to make, each with a seed that is derived from the request's. The default is 1."""
    best_of: Annotated[int, Field(ge=INT64_MIN, le=UINT64_MAX)] | None = None
    """Only the value of n is supported."""
    seed: Annotated[int, _range("seed")] | None = None
    """The same request with the same seed gives the same text. Without it the router draws a seed and tells it."""
    max_tokens: Annotated[int, _range("max_tokens")] | None = None
    """Tokens to generate at most; 0 makes none. The default is 16 for completions, 1,024 for chats. The context bounds
    it."""
    prompt_logprobs: Annotated[int, _range("prompt_logprobs")] | None = None
    """Tell the log-probability of every token of the prompt, with so many alternatives. It does not go with stream."""
    truncate_prompt_tokens: KeptTokens | None = None
    """Keep so many tokens of a longer prompt; -1 keeps what the context holds beside max_tokens. Without it a prompt
    that is too long is refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where such a prompt is cut: left, the default, keeps its last tokens, and right its first."""
    speculation: Speculation | None = None
    """How tokens are drafted for this request."""
    prediction: Prediction | None = None
    """What the answer will probably say. It makes an answer sooner that follows it, and never changes the text."""
    cache_salt: CacheSalt | None = None
    """The tenant: scope of the prefix cache and of the router's fairness. With API keys it divides the prefix cache of
    the key's tenant."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """While requests of a tenant wait, the one of the higher priority goes first. The default is 0."""
    return_token_ids: bool | None = None
    """Tell the token ids of the prompt and, in every event of a stream, those of its text. The default is false."""
    return_tokens_as_token_ids: bool | None = None
    """Write `token_id:5` for a token where log-probabilities are told. The default is false."""


class CompletionRequest(RefusedFields, GenerationBody):
    """A body of ``/v1/completions``."""

    prompt: Prompt
    """A text or token ids, or a list of up to 128 texts or lists of token ids: choice j of prompt i has the index
    i * n + j, and is the one that the prompt gets alone."""
    logprobs: Annotated[int, _range("top_logprobs")] | None = None
    """Alternatives whose log-probabilities are told. 0 tells the chosen token's alone; without it, none are told."""
    parallel_tool_calls: Ignored = None
    add_special_tokens: OnlyTrue = None
    echo: bool | None = None
    """Begin the answer with the prompt. With logprobs those of its tokens are told too. The default is false."""
    suffix: Annotated[Any, Neutral("")] = None


class ChatRequest(RefusedChatFields, GenerationBody):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], _list(MAX_MESSAGES, least=1), at_most(MAX_MESSAGES)]
    """The turns so far, in their order."""
    max_completion_tokens: Annotated[int, _range("max_tokens")] | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    """Tell the log-probability of every token. The default is false."""
    top_logprobs: Annotated[int, _range("top_logprobs")] | None = None
    """Alternatives whose log-probabilities are told for every token. It only goes with logprobs."""
    tools: Tools | None = None
    """What the model may call."""
    tool_choice: ToolChoiceModel | None = None
    """none: the model does not call, and is not told of the tools. auto, the default: as it likes. required: it calls
    one or more. An object names the one that it calls."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. The default is true."""
    reasoning_effort: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    """How much the model is to think, for chat templates that take it. Others refuse every value but medium, and none
    where the model does not think."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More values for the chat template, e.g. `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Begin the assistant's turn after the last message. The default is true, unless continue_final_message is."""
    continue_final_message: bool | None = None
    """Go on with the last message, which must be the assistant's. The default is false."""
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
