"""Requests of a run: arrivals with real text of the asked length.

Lengths are counted with the chat template and the tokenizer of ``--model``; another server's own count is in its
``usage`` and is what the report shows. Drafters live on what text repeats, so prompts are questions that somebody
asked, behind other questions' texts where they must be longer, and never random tokens.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.serving.arrivals import Arrival
from benchmarks.speculation.prompts import Prompt
from paceline.errors import ConfigError

WORDS_PER_TOKEN = 2  # more than any text has: bounds how much text is looked at
AROUND_WORDS = 7  # that the first document loses each time around
WARM_UP = ("Name three colours.", "Write one sentence about a harbour in winter.")

CountTokens = Callable[[str], int]  # of a user's message, the chat template included


@dataclass(frozen=True)
class Ask:
    """One request as it is sent."""

    number: int
    at_s: float
    text: str
    prompt_tokens: int  # by --model's tokenizer
    max_tokens: int
    seed: int


def plan(
    arrivals: Sequence[Arrival], questions: Sequence[Prompt], count: CountTokens, seed: int, skip: int = 0
) -> list[Ask]:
    """A request for each arrival. ``skip`` questions are passed over first, so that another run has other prompts.

    Raises ConfigError when all questions together are too short for a request.
    """
    texts = [question.turns[0] for question in questions]
    lengths = [count(text) for text in texts]
    uses = Counter[int]()
    asks = []
    for number, arrival in enumerate(arrivals):
        start = (skip + number) % len(texts)
        order = [*range(start, len(texts)), *range(start)]
        fits = [i for i in order if lengths[i] <= arrival.prompt_tokens]
        # The least used question that fits is taken; where none fits, the shortest is cut.
        chosen = min(fits, key=uses.__getitem__) if fits else min(order, key=lengths.__getitem__)
        uses[chosen] += 1
        behind = [texts[i] for i in order if i != chosen]
        # Once around, documents begin elsewhere: a prefix cache knows no long prompt from an earlier one.
        behind[:1] = [_from_word(document, AROUND_WORDS * ((skip + number) // len(texts))) for document in behind[:1]]
        text = fitted(texts[chosen], behind, count, arrival.prompt_tokens)
        asks.append(Ask(number, arrival.at_s, text, count(text), arrival.output_tokens, seed + skip + number))
    return asks


def fitted(question: str, documents: Sequence[str], count: CountTokens, num_tokens: int) -> str:
    """``question`` behind the first words of ``documents``, or cut, so that it counts ``num_tokens`` or a little less.

    Raises ConfigError when there are too few words.
    """
    if count(question) > num_tokens:
        words = question.split(" ")
        kept = bisect.bisect_right(range(1, len(words)), num_tokens, key=lambda n: count(" ".join(words[:n])))
        return " ".join(words[: max(1, kept)])
    words = _first_words(documents, WORDS_PER_TOKEN * num_tokens)

    def with_words(number: int) -> str:
        return " ".join(words[:number]) + "\n\n" + question if number else question

    kept = bisect.bisect_right(range(len(words) + 1), num_tokens, key=lambda n: count(with_words(n))) - 1
    if kept == len(words) and count(with_words(kept)) < num_tokens - WORDS_PER_TOKEN:
        raise ConfigError("prompts", f"all prompts together are shorter than {num_tokens} tokens")
    return with_words(max(0, kept))


def _from_word(document: str, number: int) -> str:
    words = document.split(" ")
    return " ".join(words[number % len(words) :])


def _first_words(documents: Sequence[str], most: int) -> list[str]:
    words: list[str] = []
    for document in documents:
        words += document.split(" ")
        if len(words) >= most:
            break
    return words[:most]


def warm_up(asks: Sequence[Ask], count: CountTokens, requests: int) -> list[Ask]:
    """``requests`` that are not counted: one as long as the longest of ``asks``, the others short; of other text."""
    if requests == 0:
        return []
    longest = max(asks, key=lambda ask: ask.prompt_tokens)
    words = longest.text.split(" ")
    turned = " ".join([*words[len(words) // 2 :], *words[: len(words) // 2]])
    texts = [turned, *(WARM_UP[i % len(WARM_UP)] for i in range(requests - 1))]
    return [Ask(i, 0.0, text, count(text), min(16, longest.max_tokens), i) for i, text in enumerate(texts)]
