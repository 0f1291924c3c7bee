"""Answers and errors in OpenAI's shapes. The field ``paceline`` is ours: speculation, timing, nodes, hand-off."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cluster.plan import TokenizerLike
from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PairingRefused,
    RequestCancelled,
)
from paceline.request import TokenLogprobs
from paceline.results import Choice, Chunk, Completion, Generation

Json = dict[str, Any]
UNAVAILABLE = (NodeUnavailable, PairingRefused, HandoffFailed)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(error: Exception, names: Mapping[str, str]) -> tuple[int, Json, dict[str, str]]:
    """Status, body and headers. names: what the client calls a field."""
    if isinstance(error, InvalidRequest):
        param = names.get(error.field, error.field)
        if param == "model":
            return 404, error_body(error.message, "invalid_request_error", "model", "model_not_found"), {}
        return 400, error_body(f"{param}: {error.message}", "invalid_request_error", param, "invalid_value"), {}
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return 429, error_body(str(error), "rate_limit_error", code="overloaded"), headers
    if isinstance(error, UNAVAILABLE):
        return 503, error_body(str(error), "service_unavailable_error", code="unavailable"), {"Retry-After": "1"}
    if isinstance(error, DeadlineExceeded):
        return 504, error_body(str(error), "timeout_error", code="deadline_exceeded"), {}
    if isinstance(error, RequestCancelled):
        return 499, error_body(str(error), "cancelled_error", code="cancelled"), {}
    return 500, error_body("internal error", "internal_error", code="internal"), {}


def usage_body(completions: Sequence[Completion]) -> Json:
    """All choices of one request; their prompt counts once."""
    prompt = completions[0].usage.prompt_tokens
    output = sum(completion.usage.completion_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": completions[0].usage.cached_tokens},
    }


def extension(index: int, completion: Completion, token_ids: Sequence[int]) -> Json:
    """One choice of the field ``paceline``."""
    return {"index": index, "token_ids": list(token_ids), **asdict(completion)}


class Shape(ABC):
    """What differs between the two endpoints."""

    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, tokenizer: TokenizerLike, model: str) -> None:
        self._tokenizer = tokenizer
        self.model = model
        self.created = int(time.time())

    @abstractmethod
    def choice(self, choice: Choice) -> Json:
        """Of a complete answer."""

    @abstractmethod
    def delta(self, chunk: Chunk, offset: int) -> Json:
        """Of a stream. offset: characters of this choice before the chunk."""

    def opening(self, index: int) -> Json | None:
        """Before the first chunk of a choice, if anything."""
        return None

    def frame(self, request_id: str, choices: list[Json], *, chunk: bool) -> Json:
        """The object around choices."""
        return {
            "id": f"{self.id_prefix}{request_id}",
            "object": self.chunk_object if chunk else self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def answer(self, generation: Generation) -> Json:
        """The body of a complete answer."""
        body = self.frame(generation.request_id, [self.choice(choice) for choice in generation.choices], chunk=False)
        body["usage"] = usage_body([choice.completion for choice in generation.choices])
        body["paceline"] = {"choices": [extension(c.index, c.completion, c.token_ids) for c in generation.choices]}
        return body

    def token(self, token_id: int) -> str:
        """Text of one token alone; a replacement character where it is part of a character."""
        return self._tokenizer.decode([token_id])


class CompletionShape(Shape):
    """/v1/completions."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs, 0),
            "finish_reason": str(choice.completion.finish_reason),
        }

    def delta(self, chunk: Chunk, offset: int) -> Json:
        return {
            "index": chunk.choice,
            "text": chunk.text,
            "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs, offset),
            "finish_reason": str(chunk.completion.finish_reason) if chunk.completion else None,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int) -> Json | None:
        if not logprobs:
            return None
        tokens = [self.token(token_id) for token_id in token_ids]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        top = [
            {self.token(t): value for t, value in zip(entry.top_ids, entry.top_logprobs, strict=True)}
            | {token: entry.logprob}
            for token, entry in zip(tokens, logprobs, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatShape(Shape):
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": str(choice.completion.finish_reason),
        }

    def delta(self, chunk: Chunk, offset: int) -> Json:
        return {
            "index": chunk.choice,
            "delta": {"content": chunk.text} if chunk.text else {},
            "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs),
            "finish_reason": str(chunk.completion.finish_reason) if chunk.completion else None,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if not logprobs:
            return None
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            alternatives = [self._entry(t, value) for t, value in top]
            content.append(self._entry(token_id, entry.logprob) | {"top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self.token(token_id)
        data = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}
