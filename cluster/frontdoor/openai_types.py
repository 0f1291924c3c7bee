"""From a body of OpenAI's API to what the router is asked. `cluster.frontdoor.openai_fields` says which
fields there are; here is what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract.plan import Chat, ChatMessage, GenerationRequest, Prompt
from cluster.frontdoor.openai_fields import ALL_TOP_K, CHAT, COMPLETION, COMPLETIONS_MAX_TOKENS, ROLES
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams, SpeculationParams

_SAMPLING = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "n"),
)  # which mean the same there


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
    given = COMPLETION.read(body, "")
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise InvalidRequest("best_of", f"is not supported unless it equals n, which is {n}")
    return _parse(
        given,
        request_id,
        prompt=given["prompt"],
        max_tokens=given.get("max_tokens", COMPLETIONS_MAX_TOKENS),
        top_logprobs=given.get("logprobs"),
        chat=False,
        names={"top_logprobs": "logprobs"},
    )


def parse_chat(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest naming the first field that is wrong."""
    given = CHAT.read(body, "")
    newer, older = given.get("max_completion_tokens"), given.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", "and max_completion_tokens differ; give one of them")
    messages = tuple(ChatMessage(ROLES[turn["role"]], turn["content"]) for turn in given["messages"])
    return _parse(
        given,
        request_id,
        prompt=Chat(messages),
        max_tokens=older if newer is None else newer,
        top_logprobs=_chat_logprobs(given),
        chat=True,
        names={} if newer is None else {"max_tokens": "max_completion_tokens"},
    )


def _parse(
    given: Mapping[str, Any],
    request_id: str,
    *,
    prompt: Prompt,
    max_tokens: int | None,
    top_logprobs: int | None,
    chat: bool,
    names: Mapping[str, str],
) -> ApiRequest:
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise InvalidRequest("stream_options", "only goes with stream")
    top_k = given.get("top_k", 0)
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    generation = GenerationRequest(
        prompt=prompt,
        sampling=SamplingParams(**sampling, top_k=0 if top_k == ALL_TOP_K else top_k, top_logprobs=top_logprobs),
        max_tokens=max_tokens,
        speculation=_speculation(given.get("speculation", {})),
        model=given.get("model", ""),
        request_id=request_id,
        tenant=given.get("cache_salt", ""),
        priority=given.get("priority", 0),
    )
    include_usage = given.get("stream_options", {}).get("include_usage", False)
    return ApiRequest(generation, chat, stream, include_usage, names)


def _speculation(given: Mapping[str, Any]) -> SpeculationParams:
    return SpeculationParams(
        given.get("num_draft_tokens"), given.get("tree_width"), given.get("drafter") or None, given.get("tree") or None
    )


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    """``logprobs`` is a flag here, ``top_logprobs`` how many alternatives."""
    top: int = given.get("top_logprobs", 0)
    if given.get("logprobs", False):
        return top
    if top:
        raise InvalidRequest("top_logprobs", "only goes with logprobs")
    return None
