"""Turns what the router yields into bodies and stream events of OpenAI's API.

The last thing a client gets, a body or the last event, carries what OpenAI's shape has no place for: ``paceline``, with
speculation, timing, nodes, handoff and seed of the first choice, the token ids of every choice, and with ``n > 1``
the details of each choice.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from cluster.frontdoor import openai_tools
from cluster.frontdoor.openai_answers import PromptDetails, Usage
from cluster.frontdoor.openai_logprobs import chat_logprobs, completions_logprobs
from cluster.frontdoor.openai_parse import ApiRequest
from paceline.errors import PacelineError
from paceline.request import TokenLogprobs
from paceline.results import Chunk, Completion, ToolCallPart, joined


class Decoder(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as answers need it."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Text of ``token_ids``."""


@dataclass
class _Choice:
    """What is known of one choice. A stream keeps its tokens alone."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallPart] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    characters: int = 0  # of the tokens whose logprobs were streamed
    role_sent: bool = False
    completion: Completion | None = None


class Answer:
    """The answer to one request. Feed every chunk to ``events`` (streaming) or to ``take``, then ask for ``body``."""

    def __init__(self, request: ApiRequest, model: str, tokenizer: Decoder) -> None:
        self._request = request
        self._choices = [_Choice() for _ in range(request.generation.sampling.n)]
        self._text_of = lru_cache(maxsize=4096)(lambda token_id: tokenizer.decode((token_id,)))
        kind = "chat.completion" if request.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": request.generation.request_id,
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    # -- complete ----------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Note a chunk for ``body``."""
        choice = self._choices[chunk.choice]
        choice.text.append(chunk.text)
        choice.reasoning.append(chunk.reasoning)
        choice.calls += chunk.tool_calls
        choice.token_ids += chunk.token_ids
        choice.logprobs += chunk.logprobs
        choice.completion = chunk.completion

    def body(self) -> dict[str, Any]:
        """The complete answer. Raises PacelineError when a choice is not complete."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage(), "paceline": self._details()}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said: dict[str, Any] = {"text": text}
        if self._request.chat:
            said = {"message": openai_tools.message(text, "".join(choice.reasoning), joined(choice.calls))}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs, 0),
            "finish_reason": _completed(choice).finish_reason.value,
        }

    # -- streaming ---------------------------------------------------------------------------------------------

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What to send for a chunk; nothing while no text, no logprob and no end came with it."""
        choice = self._choices[chunk.choice]
        choice.token_ids += chunk.token_ids
        choice.completion = chunk.completion
        events = []
        if self._request.chat and not choice.role_sent:
            choice.role_sent = True
            events.append(self._event([_delta(chunk.choice, {"role": "assistant", "content": ""}, None, None)]))
        if chunk.text or chunk.reasoning or chunk.tool_calls or chunk.logprobs or chunk.completion:
            events.append(self._event([self._part(choice, chunk)]))
        if all(choice.completion for choice in self._choices):
            if self._request.include_usage:
                events.append({**self._event([]), "usage": self._usage()})
            events[-1]["paceline"] = self._details()
        return events

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _part(self, choice: _Choice, chunk: Chunk) -> dict[str, Any]:
        reason = chunk.completion.finish_reason.value if chunk.completion else None
        logprobs = None
        if chunk.logprobs:
            logprobs = self._logprobs(chunk.token_ids, chunk.logprobs, choice.characters)
            choice.characters += sum(len(self._text_of(token_id)) for token_id in chunk.token_ids)
        if self._request.chat:
            return _delta(chunk.choice, openai_tools.delta(chunk), logprobs, reason)
        return {"index": chunk.choice, "text": chunk.text, "logprobs": logprobs, "finish_reason": reason}

    # -- both --------------------------------------------------------------------------------------------------

    def _logprobs(
        self, token_ids: list[int] | tuple[int, ...], logprobs: list[TokenLogprobs] | tuple[TokenLogprobs, ...], at: int
    ) -> dict[str, Any] | None:
        if self._request.generation.sampling.top_logprobs is None:
            return None
        if self._request.chat:
            return chat_logprobs(token_ids, logprobs, self._text_of)
        return completions_logprobs(token_ids, logprobs, self._text_of, at)

    def _usage(self) -> Usage:
        """The prompt counts once, however many choices there are."""
        usages = [_completed(choice).usage for choice in self._choices]
        prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=usages[0].cached_tokens),
        )

    def _details(self) -> dict[str, Any]:
        each = [_details(_completed(choice)) for choice in self._choices]
        more = {"choices": each} if len(each) > 1 else {}
        return {**each[0], "token_ids": [choice.token_ids for choice in self._choices], **more}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _completed(choice: _Choice) -> Completion:
    if choice.completion is None:
        raise PacelineError("the answer ended before its last token")
    return choice.completion


def _details(completion: Completion) -> dict[str, Any]:
    parts = ("speculation", "timing", "nodes", "handoff")
    return {**{part: asdict(getattr(completion, part)) for part in parts}, "seed": completion.seed}
