"""From a body of OpenAI's API to what the router is asked.

Fields and meanings are OpenAI's (completions, chat completions); the sampling fields that OpenAI does not have are
vLLM's. A field that would change the result and is not supported is refused by name, as is a field nobody knows;
what cannot change it (``user``, ``metadata``) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.json_body import Fields, as_integer, as_number, as_text
from cluster.plan import Chat, ChatMessage, GenerationRequest, Prompt
from paceline.errors import InvalidRequest
from paceline.request import MAX_LOGIT_BIAS, TREES, SamplingParams, SpeculationParams

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default there; a chat goes on as far as it may
MAX_STOP_TOKEN_IDS = 1024
MAX_SPECULATION = 2**31 - 1

_COMMON = {
    *("model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "logprobs"),
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("speculation", "cache_salt", "priority"),
}
_HARMLESS = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prediction"),
}
_COMPLETIONS = _COMMON | _HARMLESS | {"prompt", "echo", "suffix", "best_of"}
# Values that mean the same as leaving the field out. Any other changes the result and is refused by the field's name.
_CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of no tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_CHAT = _COMMON | _HARMLESS | _CHAT_REFUSED.keys() | {"messages", "max_completion_tokens", "top_logprobs"}

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ApiRequest:
    """A parsed body: what the router is asked, and how the answer is to look."""

    generation: GenerationRequest
    chat: bool
    stream: bool
    include_usage: bool
    names: Mapping[str, str]  # the library's name of a field -> its name in this body, where they differ

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """``error`` with the field named as this body names it."""
        return InvalidRequest(self.names.get(error.field, error.field), error.message)


def parse_completion(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/completions``. Raises InvalidRequest naming the first field that is wrong."""
    fields = Fields(body)
    fields.refuse_unknown(_COMPLETIONS)
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    _check_best_of(fields)
    return _parse(
        fields,
        request_id,
        prompt=_prompt(fields),
        max_tokens=fields.integer("max_tokens", COMPLETIONS_MAX_TOKENS),
        top_logprobs=fields.integer("logprobs", None),
        chat=False,
        names={"top_logprobs": "logprobs"},
    )


def parse_chat(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest naming the first field that is wrong."""
    fields = Fields(body)
    fields.refuse_unknown(_CHAT)
    for key, allowed in _CHAT_REFUSED.items():
        fields.refuse(key, *allowed)
    newer, older = fields.integer("max_completion_tokens", None), fields.integer("max_tokens", None)
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", "and max_completion_tokens differ; give one of them")
    return _parse(
        fields,
        request_id,
        prompt=Chat(_messages(fields)),
        max_tokens=older if newer is None else newer,
        top_logprobs=_chat_logprobs(fields),
        chat=True,
        names={} if newer is None else {"max_tokens": "max_completion_tokens"},
    )


def _parse(
    fields: Fields,
    request_id: str,
    *,
    prompt: Prompt,
    max_tokens: int | None,
    top_logprobs: int | None,
    chat: bool,
    names: Mapping[str, str],
) -> ApiRequest:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    options.refuse_unknown({"include_usage", "include_obfuscation"})
    if fields.has("stream_options") and not stream:
        raise InvalidRequest("stream_options", "only goes with stream")
    generation = GenerationRequest(
        prompt=prompt,
        sampling=_sampling(fields, top_logprobs),
        max_tokens=max_tokens,
        speculation=_speculation(fields.object("speculation")),
        model=fields.text("model", ""),
        request_id=request_id,
        tenant=fields.text("cache_salt", ""),
        priority=fields.integer("priority", 0),
    )
    return ApiRequest(generation, chat, stream, options.flag("include_usage"), names)


def _sampling(fields: Fields, top_logprobs: int | None) -> SamplingParams:
    """Types are checked here; ranges by SamplingParams.validate, once the vocabulary is known."""
    default = SamplingParams()
    top_k = fields.integer("top_k", default.top_k)
    return SamplingParams(
        temperature=fields.number("temperature", default.temperature),
        top_p=fields.number("top_p", default.top_p),
        top_k=0 if top_k == -1 else top_k,  # vLLM's other word for all
        min_p=fields.number("min_p", default.min_p),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty),
        repetition_penalty=fields.number("repetition_penalty", default.repetition_penalty),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed", None),
        stop=_stop(fields),
        stop_token_ids=tuple(
            as_integer(item, f"stop_token_ids[{i}]")
            for i, item in enumerate(fields.items("stop_token_ids", MAX_STOP_TOKEN_IDS))
        ),
        min_tokens=fields.integer("min_tokens", default.min_tokens),
        ignore_eos=fields.flag("ignore_eos"),
        top_logprobs=top_logprobs,
        n=fields.integer("n", default.n),
    )


def _speculation(fields: Fields) -> SpeculationParams:
    fields.refuse_unknown({"num_draft_tokens", "tree_width", "drafter", "tree"})
    for key, low in (("num_draft_tokens", 0), ("tree_width", 1)):
        if not low <= fields.integer(key, low) <= MAX_SPECULATION:
            raise InvalidRequest(fields.name(key), f"must be between {low} and {MAX_SPECULATION}")
    drafter, tree = (fields.text(key, "") or None for key in ("drafter", "tree"))
    if tree is not None and tree not in TREES:
        raise InvalidRequest(fields.name("tree"), f"must be one of {', '.join(TREES)}, got {tree!r}")
    depth, width = fields.integer("num_draft_tokens", None), fields.integer("tree_width", None)
    return SpeculationParams(depth, width, drafter, tree)


def _logit_bias(fields: Fields) -> dict[int, float]:
    """OpenAI's map: token ids as strings, since JSON knows no other keys."""
    given = fields.raw("logit_bias")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest("logit_bias", "must be an object from token ids to numbers")
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest("logit_bias", f"key {key[:40]!r} is not a token id")
        bias[int(key)] = as_number(value, f"logit_bias.{key}")
    return bias


def _stop(fields: Fields) -> tuple[str, ...]:
    """A string or a list of them."""
    if isinstance(fields.raw("stop"), str):
        return (fields.text("stop", ""),)
    return tuple(as_text(item, f"stop[{i}]") for i, item in enumerate(fields.items("stop")))


def _check_best_of(fields: Fields) -> None:
    best_of, n = fields.integer("best_of", None), fields.integer("n", 1)
    if best_of is not None and best_of != n:
        raise InvalidRequest("best_of", f"is not supported unless it equals n, which is {n}")


def _chat_logprobs(fields: Fields) -> int | None:
    """``logprobs`` is a flag here, ``top_logprobs`` how many alternatives."""
    top = fields.integer("top_logprobs", None)
    if not fields.flag("logprobs"):
        if top:
            raise InvalidRequest("top_logprobs", "only goes with logprobs")
        return None
    return top or 0


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    """A text or token ids; a list of one prompt is that prompt."""
    given = fields.raw("prompt")
    if given is None:
        raise InvalidRequest("prompt", "is missing")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise InvalidRequest("prompt", "one prompt per request; a list of several is not supported")
        given = given[0]
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequest("prompt", "must be a string or a list of token ids")
    return tuple(as_integer(item, f"prompt[{i}]") for i, item in enumerate(given))


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    if not fields.has("messages"):
        raise InvalidRequest("messages", "is missing")
    return tuple(_message(Fields(item, f"messages[{i}]")) for i, item in enumerate(fields.items("messages")))


def _message(fields: Fields) -> ChatMessage:
    for key in ("tool_calls", "annotations"):  # empty in an earlier answer that a client sends back
        fields.refuse(key, [])
    for key in ("name", "tool_call_id", "function_call", "refusal", "audio"):
        fields.refuse(key)
    fields.refuse_unknown({"role", "content", "tool_calls", "annotations"})
    role = fields.text("role", "")
    if role not in _ROLES:
        raise InvalidRequest(fields.name("role"), f"must be one of {', '.join(_ROLES)}")
    return ChatMessage(_ROLES[role], _content(fields))


def _content(fields: Fields) -> str:
    """A text, or text parts that are put together."""
    if not fields.has("content"):
        raise InvalidRequest(fields.name("content"), "is missing")
    if isinstance(fields.raw("content"), str):
        return fields.text("content", "")
    if not isinstance(fields.raw("content"), list):
        raise InvalidRequest(fields.name("content"), "must be a string or a list of text parts")
    name = fields.name("content")
    return "".join(_text_part(Fields(item, f"{name}[{i}]")) for i, item in enumerate(fields.items("content")))


def _text_part(fields: Fields) -> str:
    if fields.raw("type") != "text":
        raise InvalidRequest(fields.name("type"), "only text parts are supported")
    fields.refuse_unknown({"type", "text"})
    if not fields.has("text"):
        raise InvalidRequest(fields.name("text"), "is missing")
    return fields.text("text", "")
