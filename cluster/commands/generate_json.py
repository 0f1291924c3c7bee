"""The JSON that ``paceline generate --json`` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from paceline.client import Choice, Generation, TokenLogprobs


def generation_json(done: Generation) -> dict[str, Any]:
    """All choices with their numbers, under the SDK's names."""
    return {
        "request_id": done.request_id,
        "model": done.model,
        "choices": [_choice(choice) for choice in done.choices],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    numbers = asdict(choice.completion)
    del numbers["request_id"]
    return {
        "index": choice.index,
        "text": choice.text,
        "reasoning": choice.reasoning,
        "tool_calls": [asdict(call) for call in choice.tool_calls],
        "token_ids": choice.token_ids,
        "logprobs": [_logprobs(entry) for entry in choice.logprobs],
        "prompt_logprobs": [_logprobs(entry) for entry in choice.prompt_logprobs],
        **numbers,
    }


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    """JSON has no infinity: a token that cannot come has a log-probability of null."""
    return {
        "logprob": _finite(entry.logprob),
        "top_ids": entry.top_ids,
        "top_logprobs": [_finite(logprob) for logprob in entry.top_logprobs],
    }


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None
