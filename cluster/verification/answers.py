"""What a side answers, and where two answers part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import ConfigDict

from paceline.request import TokenLogprobs
from paceline.results import Choice


@dataclass(frozen=True)
class About:
    """Who answers, as far as the text depends on it. What is not known is empty."""

    model: str
    vocab_size: int = 0
    fingerprint: str = ""  # system_fingerprint
    weights: str = ""  # digest
    kernels: str = ""
    dtype: str = ""
    bit_exact: bool = False


@dataclass(frozen=True)
class Answer:
    """One choice."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")  # a token that cannot come has a logprob of -Infinity

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for

    @classmethod
    def of(cls, choice: Choice) -> Answer:
        """The same of what a router, or the SDK, gives."""
        calls = tuple((call.name, call.arguments) for call in choice.tool_calls)
        reason = choice.completion.finish_reason.value
        return cls(choice.token_ids, choice.text, reason, choice.reasoning, calls, choice.logprobs)


@dataclass(frozen=True)
class Parting:
    """Where two answers part. Equal tokens may still make another text, or end for another reason: ``what`` says so."""

    choice: int
    index: int | None  # of the first token that differs; None: all tokens are equal
    tokens: tuple[int | None, int | None]  # there; None: that answer has ended
    what: str = "token_ids"


def parting(first: Sequence[Answer], other: Sequence[Answer]) -> Parting | None:
    """The first choice that differs; None: all are equal."""
    if len(first) != len(other):
        return Parting(min(len(first), len(other)), None, (None, None), f"{len(first)} and {len(other)} choices")
    for choice, (one, two) in enumerate(zip(first, other, strict=True)):
        found = _of_choice(choice, one, two)
        if found is not None:
            return found
    return None


def _of_choice(choice: int, one: Answer, two: Answer) -> Parting | None:
    for index, pair in enumerate(zip_longest(one.token_ids, two.token_ids)):
        if pair[0] != pair[1]:
            return Parting(choice, index, pair)
    for name in ("text", "reasoning", "tool_calls", "finish_reason"):
        if getattr(one, name) != getattr(two, name):
            return Parting(choice, None, (None, None), name)
    return None


def largest_gap(first: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest difference between log-probabilities of the same chosen token of equal answers; 0 without any."""
    pairs = [
        (a.logprob, b.logprob)
        for one, two in zip(first, other, strict=True)
        for a, b in zip(one.logprobs, two.logprobs, strict=False)
    ]
    return max((abs(a - b) for a, b in pairs if a != b), default=0.0)


def shown(entry: TokenLogprobs) -> dict[str, Any]:
    """Log-probabilities at one place, for a report."""
    best = [[token_id, number(value)] for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)]
    return {"logprob": number(entry.logprob), "best": best}


def number(value: float) -> float | str:
    """``value`` for JSON, which has no infinity: as a text, e.g. -Infinity, like in recorded answers."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
