"""Turns a body of OpenAI's API into what the router is asked. `cluster.frontdoor.openai_requests` says which
fields there are; here is what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract.generation import Chat, ChatMessage, GenerationRequest, Prompt
from cluster.frontdoor.json_models import read
from cluster.frontdoor.openai_requests import (
    ALL_TOP_K,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    Message,
    Speculation,
)
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams, SpeculationParams

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default there; that of chats is DEFAULT_MAX_TOKENS of the plan
# Fields that mean the same in SamplingParams.
_SAMPLING = {
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "min_tokens", "ignore_eos", "n"),
}


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
    asked = read(CompletionRequest, body)
    n = 1 if asked.n is None else asked.n
    if asked.best_of not in (None, n):
        raise InvalidRequest("best_of", f"is not supported unless it equals n, which is {n}")
    return _parse(
        asked,
        request_id,
        prompt=_prompt(asked.prompt),
        max_tokens=COMPLETIONS_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        top_logprobs=asked.logprobs,
        names={"top_logprobs": "logprobs"},
    )


def parse_chat(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest naming the first field that is wrong."""
    asked = read(ChatRequest, body)
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", "and max_completion_tokens differ; give one of them")
    return _parse(
        asked,
        request_id,
        prompt=Chat(tuple(_chat_message(message) for message in asked.messages)),
        max_tokens=older if newer is None else newer,
        top_logprobs=_chat_logprobs(asked),
        names={} if newer is None else {"max_tokens": "max_completion_tokens"},
    )


def _parse(
    asked: GenerationBody,
    request_id: str,
    *,
    prompt: Prompt,
    max_tokens: int | None,
    top_logprobs: int | None,
    names: Mapping[str, str],
) -> ApiRequest:
    stream = bool(asked.stream)
    if asked.stream_options is not None and not stream:
        raise InvalidRequest("stream_options", "only goes with stream")
    generation = GenerationRequest(
        prompt=prompt,
        sampling=_sampling(asked, top_logprobs),
        max_tokens=max_tokens,
        speculation=_speculation(asked.speculation or Speculation()),
        model=asked.model or "",
        request_id=request_id,
        tenant=asked.cache_salt or "",
        priority=asked.priority or 0,
    )
    include_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    return ApiRequest(generation, isinstance(asked, ChatRequest), stream, include_usage, names)


def _sampling(asked: GenerationBody, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        **asked.model_dump(include=_SAMPLING, exclude_none=True),
        top_k=0 if asked.top_k in (None, ALL_TOP_K) else asked.top_k,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logit_bias={int(token_id): bias for token_id, bias in (asked.logit_bias or {}).items()},
        top_logprobs=top_logprobs,
    )


def _speculation(asked: Speculation) -> SpeculationParams:
    return SpeculationParams(asked.num_draft_tokens, asked.tree_width, asked.drafter or None, asked.tree or None)


def _prompt(given: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    """A text or token ids; a list of one prompt is that prompt."""
    match given:
        case str():
            return given
        case [str() as text]:
            return text
        case [list() as token_ids]:
            return tuple(token_ids)
        case _:
            return tuple(given)  # type: ignore[arg-type]  # the model has seen that they are integers


def _chat_message(message: Message) -> ChatMessage:
    content, role = message.content, message.role
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return ChatMessage("system" if role == "developer" else role, text)


def _chat_logprobs(asked: ChatRequest) -> int | None:
    """``logprobs`` is a flag here, ``top_logprobs`` how many alternatives."""
    top = asked.top_logprobs or 0
    if asked.logprobs:
        return top
    if top:
        raise InvalidRequest("top_logprobs", "only goes with logprobs")
    return None
