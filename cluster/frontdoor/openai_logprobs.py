"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.request import TokenLogprobs

LOWEST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have
REPLACEMENT = "\ufffd"

TokenText = Callable[[int], str]  # text of one token by itself


def completions_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_of: TokenText, offset: int
) -> dict[str, Any]:
    """The shape of ``/v1/completions``: parallel lists. offset: characters of the choice before the first token.

    Alternatives that read the same share a key, which keeps the best; the chosen token is always among them.
    """
    tokens = [text_of(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_best(token, entry, text_of) for token, entry in zip(tokens, logprobs, strict=True)],
        "text_offset": offsets,
    }


def _best(token: str, entry: TokenLogprobs, text_of: TokenText) -> dict[str, float]:
    best: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        best.setdefault(text_of(token_id), finite(logprob))  # they come best first
    best.setdefault(token, finite(entry.logprob))
    return best


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_of: TokenText
) -> dict[str, list[dict[str, Any]] | None]:
    """The shape of ``/v1/chat/completions``: one object per token."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        item = _token(text_of(token_id), entry.logprob)
        item["top_logprobs"] = [_token(text_of(other), logprob) for other, logprob in top]
        content.append(item)
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` is null for a token that is no text by itself, such as half a character."""
    known = None if REPLACEMENT in text else list(text.encode("utf-8"))
    return {"token": text, "logprob": finite(logprob), "bytes": known}


def finite(logprob: float) -> float:
    """``logprob``, or OpenAI's word for minus infinity."""
    return max(logprob, LOWEST)
