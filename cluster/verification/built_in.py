"""Requests for those who bring none: prompts of every kind, crossed with all that changes which token comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.verification.asked import Asked, request_of

SAMPLED, GREEDY = {"temperature": 1.0}, {"temperature": 0.0}
STORY = "The riders took turns at the front, each of them for a minute, and the wind grew stronger with every hill. "
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "population": {"type": "integer"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["city", "population", "rivers"],
    "additionalProperties": False,
}
TEXTS = (
    "The capital of France is",
    "def quicksort(numbers):\n    ",
    "Once upon a time, in a village by the sea,",
    "red, green, blue, red, green, blue, red, green,",
    "Über den Wolken 東京 naïve café:",
)
LONG = STORY * 12
QUESTION = [{"role": "user", "content": "Name three rivers of Europe, and the seas that they reach."}]
# What is special about a request, and the tokens of its answer.
KINDS: tuple[tuple[dict[str, Any], int], ...] = (
    (GREEDY, 64),
    (SAMPLED, 64),
    ({"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02}, 48),
    ({"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3}, 48),
    ({"temperature": 0.7, "repetition_penalty": 1.3, "min_tokens": 8}, 48),
    (SAMPLED | {"top_logprobs": 5}, 24),
    (GREEDY | {"stop": [".", "\n\n"]}, 64),
)
FORMATS: tuple[dict[str, Any], ...] = (
    GREEDY | {"response_format": SCHEMA},
    SAMPLED | {"response_format": SCHEMA},
    SAMPLED | {"regex": r"[A-Z][a-z]{2,12}, [0-9]{4}"},
    SAMPLED | {"choice": ["yes", "no", "it depends"]},
)


def built_in(max_model_len: int, chats: bool) -> list[Asked]:
    """Those that fit into the context, whatever the tokenizer. chats: whether the model has a chat template."""
    made: list[Asked] = []
    for fields in _all(chats):
        text = fields.get("prompt") or str(fields.get("messages"))
        if len(text.encode()) + fields["max_tokens"] < max_model_len:  # a token has a byte at least
            made.append(request_of(len(made) + 1, fields))
    return made


def _all(chats: bool) -> Iterator[dict[str, Any]]:
    for text in TEXTS:
        for options, tokens in KINDS:
            yield {"prompt": text, "max_tokens": tokens, **options}
    for options in (GREEDY, SAMPLED, SAMPLED | {"prompt_logprobs": 0}):
        yield {"prompt": LONG, "max_tokens": 24, **options}
    yield {"prompt": TEXTS[2], "max_tokens": 32, **SAMPLED, "n": 3}
    yield {"prompt": TEXTS[2], "max_tokens": 96, **SAMPLED, "ignore_eos": True}
    for options in FORMATS:
        yield {"prompt": "Paris: ", "max_tokens": 96, **options}
    if chats:
        for options in (GREEDY, SAMPLED, FORMATS[0], FORMATS[1]):
            yield {"messages": QUESTION, "max_tokens": 96, **options}
