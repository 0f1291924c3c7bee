"""Log-probabilities in the two shapes of OpenAI's API.

What a token adds to the text is bytes: it may be a part of a character, or none at all. The bytes of a choice's tokens,
one after the other, are the text in UTF-8, and go on behind it where a stop string or a stop token cut it. The prompt's
last character counts to the text where the first token completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.request import TokenLogprobs
from paceline.text.detokenizer import ByteSource, end_of

LOWEST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have


@dataclass(frozen=True)
class Placed:
    """A token in its place."""

    token_id: int
    data: bytes  # what it adds to the text
    offset: int  # characters of the text before its first byte
    logprobs: TokenLogprobs
    others: tuple[bytes, ...]  # what the alternatives would add


class Placing:
    """Takes the tokens of a choice in their order and says where in its text they are."""

    def __init__(self, tokenizer: ByteSource, prompt_ids: Sequence[int], start: int = 0) -> None:
        """start: characters of the text before the first token, which repeat the prompt."""
        self._tokenizer = tokenizer
        before = end_of(tokenizer, prompt_ids, skip_special_tokens=True)
        self._strip = 0 if before else tokenizer.strip_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._open = self._decoder.getstate()[0]  # of the prompt's last character, until a token goes on with it
        self._offset = start

    def place(self, token_id: int, logprobs: TokenLogprobs) -> Placed:
        """The next token."""
        data = self._added(token_id)
        others = tuple(self._added(other) for other in logprobs.top_ids)
        own = self._tokenizer.token_bytes(token_id, True)
        new = data.removeprefix(self._open)
        offset = self._offset + _broken(self._decoder.getstate()[0], new[:1])
        self._offset += len(self._decoder.decode(new))
        if own:
            self._open = b""
            self._strip = self._strip - (len(own) - len(data)) if not data else 0
        return Placed(token_id, data, offset, logprobs, others)

    def _added(self, token_id: int) -> bytes:
        """A text that begins with the answer loses some leading spaces."""
        data = self._tokenizer.token_bytes(token_id, True)
        if self._strip:
            spaces = len(data) - len(data.lstrip(b" "))
            return data[min(spaces, self._strip) :]
        return self._open + data if data else data


def _broken(begun: bytes, byte: bytes) -> int:
    """Characters U+FFFD that what was begun becomes before the byte; none where the byte goes on with it."""
    if not (begun and byte):
        return 0
    try:
        codecs.utf_8_decode(begun + byte, "strict", False)
    except UnicodeDecodeError:
        return len(begun.decode("utf-8", "replace"))
    return 0


def completions_logprobs(placed: Sequence[Placed], length: int, by_id: bool = False) -> dict[str, Any]:
    """The shape of ``/v1/completions``: parallel lists. length: characters of the whole text, behind which no token
    is. by_id: tokens are called by their ids.

    Alternatives that read the same share a key, which keeps the best; the chosen token is always among them.
    """
    tokens = [_name(token.token_id, token.data, by_id) for token in placed]
    return {
        "tokens": tokens,
        "token_logprobs": [finite(token.logprobs.logprob) for token in placed],
        "top_logprobs": [_best(name, token, by_id) for name, token in zip(tokens, placed, strict=True)],
        "text_offset": [min(token.offset, length) for token in placed],
    }


def best_of(name: str, entry: TokenLogprobs, others: Sequence[str]) -> dict[str, float]:
    """Log-probabilities by what tokens are called. ``name``, the token that is there, comes first, as in vLLM; others:
    the alternatives' names."""
    best = {name: finite(entry.logprob)}
    for other, logprob in zip(others, entry.top_logprobs, strict=True):
        best[other] = max(best.get(other, LOWEST), finite(logprob))
    return best


def _best(name: str, token: Placed, by_id: bool) -> dict[str, float]:
    ids = zip(token.logprobs.top_ids, token.others, strict=True)
    return best_of(name, token.logprobs, [_name(token_id, data, by_id) for token_id, data in ids])


def chat_logprobs(placed: Sequence[Placed], by_id: bool = False) -> dict[str, list[dict[str, Any]] | None]:
    """The shape of ``/v1/chat/completions``: one object per token. by_id: tokens are called by their ids."""
    content = []
    for token in placed:
        entry = token.logprobs
        top = zip(entry.top_ids, token.others, entry.top_logprobs, strict=True)
        item = _token(token.token_id, token.data, entry.logprob, by_id)
        item["top_logprobs"] = [_token(other, data, logprob, by_id) for other, data, logprob in top]
        content.append(item)
    return {"content": content, "refusal": None}


def _token(token_id: int, data: bytes, logprob: float, by_id: bool) -> dict[str, Any]:
    return {"token": _name(token_id, data, by_id), "logprob": finite(logprob), "bytes": list(data)}


def _name(token_id: int, data: bytes, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else data.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """``logprob``, or OpenAI's word for minus infinity."""
    return max(logprob, LOWEST)
