"""Turns a body of OpenAI's API into what the router is asked. `cluster.frontdoor.openai_requests` says which
fields there are; here is what they mean together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.access.caller import with_salt
from cluster.contract.generation import Chat, ChatMessage, GenerationRequest, Prompt
from cluster.frontdoor.json_models import ignored_fields, read
from cluster.frontdoor.openai_formats import grammar_of
from cluster.frontdoor.openai_requests import (
    ALL_TOP_K,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    Message,
    Prediction,
    SamplingFields,
    Speculation,
    StreamOptions,
    TextPart,
)
from cluster.frontdoor.tool_models import body_field, tool, tool_call, tool_choice
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams, SpeculationParams

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default there; that of chats is DEFAULT_MAX_TOKENS of the plan
# Fields that mean the same in SamplingParams.
_SAMPLING = {
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "min_tokens", "ignore_eos", "n", "skip_special_tokens"),
}


@dataclass(frozen=True)
class ApiRequest:
    """A parsed body: what the router is asked, and how the answer is to look."""

    generation: GenerationRequest
    chat: bool
    stream: bool
    include_usage: bool
    names: Mapping[str, str]  # the library's name of a field -> its name in this body, where they differ
    continuous_usage: bool = False  # every event of a stream tells the usage so far
    return_token_ids: bool = False  # the answer tells the prompt's and each choice's
    tokens_as_ids: bool = False  # log-probabilities name tokens by their ids
    ignored: tuple[str, ...] = ()  # fields of the body that were not looked at
    more: tuple[GenerationRequest, ...] = ()  # for the prompts after the first one
    echo: bool = False
    prompt_logprobs: int | None = None  # alternatives to tell of the prompt's tokens in vLLM's shape

    @property
    def generations(self) -> tuple[GenerationRequest, ...]:
        """One for each prompt."""
        return (self.generation, *self.more)

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """``error`` with the field named as this body names it, whatever within the field it is about."""
        field = body_field(error.field) if self.chat else error.field
        name, *rest = re.split(r"(?=[.\[])", field, maxsplit=1)
        return InvalidRequest("".join([self.names.get(name, name), *rest]), error.message, error.code)


def parse_completion(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/completions``. Raises InvalidRequest naming the first field that is wrong."""
    asked = read(CompletionRequest, body)
    first, *others = _prompts(asked.prompt)
    parsed = _parse(
        asked,
        request_id,
        prompt=first,
        max_tokens=COMPLETIONS_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        top_logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
        names={"top_logprobs": "logprobs"},
    )
    more = (
        replace(parsed.generation, prompt=prompt, request_id=f"{request_id}-{i}") for i, prompt in enumerate(others, 1)
    )
    return replace(parsed, more=tuple(more), echo=bool(asked.echo))


def parse_chat(body: dict[str, Any], request_id: str) -> ApiRequest:
    """A body of ``/v1/chat/completions``. Raises InvalidRequest naming the first field that is wrong."""
    asked = read(ChatRequest, body)
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", "and max_completion_tokens differ; give one of them")
    return _parse(
        asked,
        request_id,
        prompt=_chat(asked),
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
    prompt_logprobs: int | None = None,
) -> ApiRequest:
    """prompt_logprobs: alternatives that the answer needs of the prompt's tokens, beside those of the field."""
    stream, options = bool(asked.stream), asked.stream_options or StreamOptions()
    if asked.prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs", "does not go with stream")
    of_prompt = [most for most in (asked.prompt_logprobs, prompt_logprobs) if most is not None]
    if asked.stream_options is not None and not stream:
        raise InvalidRequest("stream_options", "only goes with stream")
    n = 1 if asked.n is None else asked.n
    if asked.best_of not in (None, n):
        raise InvalidRequest("best_of", f"is not supported unless it equals n, which is {n}")
    format_name, grammar = grammar_of(asked)
    tenant, salt = with_salt(asked.cache_salt or "")
    sampled = sampling_of(asked, top_logprobs)
    generation = GenerationRequest(
        prompt=prompt,
        sampling=replace(sampled, grammar=grammar, prompt_logprobs=max(of_prompt, default=None)),
        max_tokens=max_tokens,
        speculation=replace(
            speculation_of(asked.speculation or Speculation()), prediction=_prediction(asked.prediction)
        ),
        model=asked.model or "",
        request_id=request_id,
        tenant=tenant,
        cache_salt=salt,
        priority=asked.priority or 0,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        truncation_side=asked.truncation_side or "",
    )
    return ApiRequest(
        generation,
        chat=isinstance(asked, ChatRequest),
        stream=stream,
        include_usage=bool(options.include_usage),
        names={**names, "grammar": format_name} if format_name else names,
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        ignored=tuple(ignored_fields(asked)),
        prompt_logprobs=asked.prompt_logprobs,
    )


def sampling_of(asked: SamplingFields, top_logprobs: int | None = None) -> SamplingParams:
    """What a body says of it, as plain data."""
    return SamplingParams(
        **asked.model_dump(include=_SAMPLING, exclude_none=True),
        top_k=0 if asked.top_k in (None, ALL_TOP_K) else asked.top_k,
        stop=tuple(text for text in ([asked.stop] if isinstance(asked.stop, str) else asked.stop or []) if text),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logit_bias={int(token_id): bias for token_id, bias in (asked.logit_bias or {}).items()},
        top_logprobs=top_logprobs,
        bad_words=tuple(asked.bad_words or ()),
        include_stop_str_in_output=bool(asked.include_stop_str_in_output or asked.no_stop_trim),
    )


def speculation_of(asked: Speculation) -> SpeculationParams:
    """What a body says of it, as plain data."""
    return SpeculationParams(asked.num_draft_tokens, asked.tree_width, asked.drafter or None, asked.tree or None)


def _prediction(asked: Prediction | None) -> str:
    """The text that the answer is predicted to be; empty for none."""
    return "" if asked is None else _text_of(asked.content)


def _text_of(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """Texts or token ids; the list is not empty."""
    match given:
        case str():
            return [given]
        case [str() | list(), *_]:
            return [one if isinstance(one, str) else tuple(one) for one in given]  # type: ignore[arg-type]
        case _:
            return [tuple(given)]  # type: ignore[arg-type]  # the model has seen that they are integers


def _chat(asked: ChatRequest) -> Chat:
    choice, name = tool_choice(asked.tool_choice)
    goes_on = bool(asked.continue_final_message)
    if goes_on and asked.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "and add_generation_prompt exclude each other")
    values = asked.chat_template_kwargs
    return Chat(
        tuple(chat_message(i, message) for i, message in enumerate(asked.messages)),
        tools=tuple(tool(i, model) for i, model in enumerate(asked.tools or ())),
        tool_choice=choice,
        tool_name=name,
        one_tool_call=asked.parallel_tool_calls is False,
        continue_final_message=goes_on,
        template_values=json.dumps(values) if values else "",
        no_generation_prompt=asked.add_generation_prompt is False,
        reasoning_effort=asked.reasoning_effort or "",
    )


def chat_message(index: int, message: Message) -> ChatMessage:
    """A turn as the template gets it."""
    content, role = message.content, message.role
    if content is None and not message.tool_calls:
        raise InvalidRequest(f"messages[{index}].content", "is missing")
    text = _text_of(content)
    return ChatMessage(
        "system" if role == "developer" else role,
        text,
        tuple(map(tool_call, message.tool_calls or ())),
        message.tool_call_id or "",
        message.name or "",
        message.reasoning_content or message.reasoning or "",
    )


def _chat_logprobs(asked: ChatRequest) -> int | None:
    """``logprobs`` is a flag here, ``top_logprobs`` how many alternatives."""
    top = asked.top_logprobs or 0
    if asked.logprobs:
        return top
    if top:
        raise InvalidRequest("top_logprobs", "only goes with logprobs")
    return None
