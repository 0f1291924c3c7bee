"""What an answer tells of its prompt: the text (``echo``), and log-probabilities in OpenAI's and in vLLM's shape.

The first token of a prompt has no log-probability, since nothing comes before it: it is null in both shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cluster.frontdoor.openai_logprobs import best_of, finite
from cluster.frontdoor.prompts import Decoder
from paceline.request import TokenLogprobs

Entries = Sequence[TokenLogprobs]
TokenText = Callable[[int], str]  # text of one token by itself
REPLACEMENT = "\ufffd"
MOST_TOKENS_OF_A_CHARACTER = 4


def echoed_logprobs(
    token_ids: Sequence[int], first: int, entries: Entries, top: int, text_of: TokenText, offsets: Sequence[int]
) -> dict[str, Any]:
    """Tokens of the prompt in the shape of ``/v1/completions``, from place ``first`` on: those that ``entries`` speak
    of, and before place 1 the first token. top: alternatives to tell; offsets: where each token of the prompt begins in
    its text."""
    places = range(first, first + len(entries))
    tokens = [text_of(token_ids[place]) for place in places]
    told: dict[str, Any] = {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [_best(name, _cut(entry, top), text_of) for name, entry in zip(tokens, entries, strict=True)],
        "text_offset": [offsets[place] for place in places],
    }
    if first > 1:
        return told
    start = {"tokens": [text_of(token_ids[0])], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return joined(start, told)


def _best(name: str, entry: TokenLogprobs, text_of: TokenText) -> dict[str, float]:
    return best_of(name, entry, [text_of(token_id) for token_id in entry.top_ids])


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """Parallel lists, put together."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def text_offsets(token_ids: Sequence[int], tokenizer: Decoder) -> list[int]:
    """Where each token begins in the text of all of them, in characters. Tokens that share a character all begin where
    it does."""
    offsets: list[int] = []
    at, group = 0, list[int]()
    before = tuple[int, ...]()  # the last tokens with a text: a tokenizer may drop the space that a text begins with
    skipped = ""
    for token_id in token_ids:
        offsets.append(at)
        group.append(token_id)
        text = tokenizer.decode((*before, *group))[len(skipped) :]
        if REPLACEMENT in text and len(group) < MOST_TOKENS_OF_A_CHARACTER:
            continue
        if text:
            at, before = at + len(text), tuple(group)
            skipped = tokenizer.decode(before)
        group = []
    return offsets


def prompt_logprobs(
    token_ids: Sequence[int], entries: Entries, top: int, text_of: TokenText
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each token of the prompt what stood to choose there, by token id, the prompt's own token first.
    ``rank`` is null for a token that is not among those that were asked for."""
    return [None, *(_by_id(i, _cut(entry, top), text_of) for i, entry in zip(token_ids[1:], entries, strict=True))]


def _by_id(token_id: int, entry: TokenLogprobs, text_of: TokenText) -> dict[str, dict[str, Any]]:
    ranks = {other: rank for rank, other in enumerate(entry.top_ids, 1)}
    values = {token_id: entry.logprob, **dict(zip(entry.top_ids, entry.top_logprobs, strict=True))}
    return {
        str(other): {"logprob": finite(value), "rank": ranks.get(other), "decoded_token": text_of(other)}
        for other, value in values.items()
    }


def _cut(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    return replace(entry, top_ids=entry.top_ids[:top], top_logprobs=entry.top_logprobs[:top])
