"""The fields of OpenAI's API that are taken, by endpoint.

Fields and meanings are OpenAI's (completions, chat completions); the sampling fields that OpenAI does not have are
vLLM's. A field that would change the result and is not supported is refused by name, as is a field nobody knows; what
cannot change it (``user``, ``metadata``) is ignored. What only the deployment knows, such as its vocabulary, its
context and its drafters, is checked later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.contract.plan import MAX_MESSAGES, MAX_NAME_CHARS, MAX_PRIORITY, MAX_STOP_TOKEN_IDS
from cluster.frontdoor.json_kinds import ANYTHING, Kind, flag, integer, list_of, number, object_of, one_of, only, text
from paceline.errors import InvalidRequest
from paceline.request import INT32_MAX, MAX_BIAS, MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, RANGES
from paceline.speculation import TreeKind

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default there; a chat goes on as far as it may
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOKEN_ID = integer(0, INT32_MAX)
ALL_TOP_K = -1  # vLLM's other word for 0


def _ranged(name: str, integral: bool = False) -> Kind[Any]:
    low, high = RANGES[name]
    return integer(int(low), int(high)) if integral else number(low, high)


def _token_ids(value: list[Any], name: str) -> tuple[int, ...]:
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= INT32_MAX:  # millions take no time
        return tuple(value)
    return list_of(TOKEN_ID, len(value), least=1).read(value, name)


def _read_prompt(value: Any, name: str) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequest(name, "one prompt per request; a list of several is not supported")
        value = value[0]
    if isinstance(value, str):
        return text(shortest=1).read(value, name)
    if not isinstance(value, list):
        raise InvalidRequest(name, "must be a string or a list of token ids")
    return _token_ids(value, name)


def _prompt() -> Kind[str | tuple[int, ...]]:
    """A text or token ids; a list of one prompt is that prompt."""
    one = [text(shortest=1).schema, {"type": "array", "items": TOKEN_ID.schema, "minItems": 1}]
    lists = [{"type": "array", "items": schema, "minItems": 1, "maxItems": 1} for schema in one]
    return Kind(_read_prompt, {"anyOf": [*one, *lists]})


def _stop() -> Kind[tuple[str, ...]]:
    """A string or a list of them."""
    one = text(1, MAX_STOP_LENGTH)
    several = list_of(one, MAX_STOP_STRINGS)

    def read(value: Any, name: str) -> tuple[str, ...]:
        return (one.read(value, name),) if isinstance(value, str) else several.read(value, name)

    return Kind(read, {"anyOf": [one.schema, several.schema]})


def _logit_bias() -> Kind[dict[int, float]]:
    """OpenAI's map: token ids as strings, since JSON knows no other keys."""
    bias = number(-MAX_BIAS, MAX_BIAS)

    def read(value: Any, name: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise InvalidRequest(name, "must be an object from token ids to numbers")
        if len(value) > MAX_LOGIT_BIAS:
            raise InvalidRequest(name, f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 11):
                raise InvalidRequest(name, f"key {key[:40]!r} is not a token id")
        return {int(key): bias.read(item, f"{name}.{key}") for key, item in value.items()}

    ids = {"pattern": "^[0-9]{1,10}$"}
    schema = {"propertyNames": ids, "additionalProperties": bias.schema, "maxProperties": MAX_LOGIT_BIAS}
    return Kind(read, {"type": "object", **schema})


def _content() -> Kind[str]:
    """A text, or text parts that are put together."""
    plain = text()
    parts = list_of(object_of({"type": one_of("text"), "text": plain}, ("type", "text")), MAX_MESSAGES)

    def read(value: Any, name: str) -> str:
        if isinstance(value, str):
            return plain.read(value, name)
        if not isinstance(value, list):
            raise InvalidRequest(name, "must be a string or a list of text parts")
        return "".join(part["text"] for part in parts.read(value, name))

    return Kind(read, {"anyOf": [plain.schema, parts.schema]})


_MESSAGE = object_of(
    {
        "role": one_of(*ROLES),
        "content": _content(),
        **{key: only([]) for key in ("tool_calls", "annotations")},  # of an earlier answer that a client sends back
        **{key: only() for key in ("name", "tool_call_id", "function_call", "refusal", "audio")},
    },
    ("role", "content"),
)
_SPECULATION = object_of(
    {
        "num_draft_tokens": integer(0, INT32_MAX),
        "tree_width": integer(1, INT32_MAX),
        "drafter": text(),
        "tree": one_of("", *TreeKind),
    }
)
_COMMON: Mapping[str, Kind[Any]] = {
    "model": text().described("The model that is served; without it, that one."),
    "stream": flag(),
    "stream_options": object_of({"include_usage": flag(), "include_obfuscation": flag()}).described(
        "Only with stream."
    ),
    "n": _ranged("n", integral=True),
    "stop": _stop(),
    "seed": _ranged("seed", integral=True),
    "max_tokens": _ranged("max_tokens", integral=True),
    **{name: _ranged(name) for name in ("temperature", "presence_penalty", "frequency_penalty")},
    "top_p": number(0, 1, above=True),
    "logit_bias": _logit_bias(),
    "top_k": integer(ALL_TOP_K, INT32_MAX).described("0 and -1 keep all tokens."),
    **{name: _ranged(name) for name in ("min_p", "repetition_penalty")},
    "min_tokens": integer(0, INT32_MAX).described("At most max_tokens."),
    "ignore_eos": flag(),
    "stop_token_ids": list_of(TOKEN_ID, MAX_STOP_TOKEN_IDS),
    "speculation": _SPECULATION.described("Capped by the deployment's own values."),
    "cache_salt": text(longest=MAX_NAME_CHARS).described("Scope of the prefix cache: the tenant."),
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
}
_HARMLESS = {
    name: ANYTHING.described("Ignored.")
    for name in (
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    )
}
COMPLETION = object_of(
    {
        "prompt": _prompt(),
        **_COMMON,
        "logprobs": _ranged("top_logprobs", integral=True),
        "best_of": integer().described("Only n is supported."),
        "echo": only(False),
        "suffix": only(""),
        **_HARMLESS,
    },
    ("prompt",),
)
CHAT = object_of(
    {
        "messages": list_of(_MESSAGE, MAX_MESSAGES, least=1),
        **_COMMON,
        "max_completion_tokens": _ranged("max_tokens", integral=True),
        "logprobs": flag(),
        "top_logprobs": _ranged("top_logprobs", integral=True).described("Only with logprobs."),
        "tools": only([]),
        "tool_choice": only("none", "auto"),  # of no tools
        "functions": only([]),
        "function_call": only("none", "auto"),
        "response_format": only({"type": "text"}),
        "modalities": only(["text"]),
        **{name: only() for name in ("audio", "reasoning_effort", "verbosity", "web_search_options")},
        **_HARMLESS,
    },
    ("messages",),
)
