"""What a fake server says, token by token. A token is a byte of UTF-8, and 256 ends an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.client.testing.asked import Asked
from paceline.errors import PacelineError
from paceline.request import FinishReason, TokenLogprobs
from paceline.results import Chunk, Round, ToolCall, ToolCallPart

END = 256  # the token that ends an answer
VOCAB_SIZE = 257
DRAFTER = "fake"


@dataclass(frozen=True)
class Answer:
    """What the model is to say. Every choice of a request says the same."""

    text: str = ""  # the text; max_tokens cuts it, a byte a token
    reasoning: str = ""  # what it thinks before the text
    tool_calls: Sequence[ToolCall] = ()  # what it calls after the text: tools that the request offers
    delay_s: float = 0.0  # seconds before the first token
    pause_s: float = 0.0  # seconds before each further chunk of a stream
    tokens_per_chunk: int = 4  # tokens that a round commits; the first token comes alone
    breaks_after: int | None = None  # tokens after which the connection breaks, once: the SDK asks for the rest
    error: PacelineError | None = None  # what ends the answer after breaks_after tokens in place of that, every time


Said = Answer | PacelineError | str  # an error refuses the request, a text is an Answer
Script = Said | Callable[[Asked], Said]  # a function decides when it is asked


@dataclass(frozen=True)
class Token:
    """A token, and what becomes certain with it."""

    id: int
    text: str = ""
    reasoning: str = ""
    part: ToolCallPart | None = None


def tokens_of(answer: Answer) -> list[Token]:
    """All tokens of an answer: those of the reasoning, of the text, of the calls, and the end."""
    made = [Token(i, reasoning=said) for i, said in _bytes(answer.reasoning)]
    made += [Token(i, text=said) for i, said in _bytes(answer.text)]
    for index, call in enumerate(answer.tool_calls):
        *name, last = call.name.encode()
        made += [Token(i) for i in name]
        made.append(Token(last, part=ToolCallPart(index, call.id, call.name)))
        for i, said in _bytes(call.arguments):
            made.append(Token(i, part=ToolCallPart(index, arguments=said) if said else None))
    return [*made, Token(END)]


def _bytes(text: str) -> Iterator[tuple[int, str]]:
    """Each byte, with the character that it completes."""
    for character in text:
        *first, last = character.encode()
        yield from ((i, "") for i in first)
        yield last, character


def end_of(answer: Answer, max_tokens: int) -> FinishReason:
    """Why the answer ends where at most ``max_tokens`` are said."""
    if len(tokens_of(answer)) > max_tokens:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if answer.tool_calls else FinishReason.STOP


def rounds_of(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the tokens of each chunk begin and end: the first token alone, then ``size`` a round."""
    if num_tokens:
        yield 0, 1
    yield from ((at, min(at + size, num_tokens)) for at in range(1, num_tokens, size))


def chunk_of(choice: int, said: Sequence[Token], first: int, end: int, top_logprobs: int | None) -> Chunk:
    """The chunk with the tokens from ``first`` to ``end``."""
    some = said[first:end]
    drafted = end - first - 1
    parts = [token.part for token in some if token.part is not None]
    return Chunk(
        choice,
        first,
        tuple(token.id for token in some),
        "".join(token.text for token in some),
        () if top_logprobs is None else tuple(_logprobs(token.id, top_logprobs) for token in some),
        None if first == 0 else Round(drafted, drafted, drafted, DRAFTER),
        reasoning="".join(token.reasoning for token in some),
        tool_calls=tuple(parts),
    )


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token is certain."""
    others = [i for i in range(count + 1) if i != token_id]
    best = [token_id, *others][:count]
    return TokenLogprobs(0.0, tuple(best), tuple(0.0 if i == token_id else float("-inf") for i in best))


def check_possible(answer: Answer, asked: Asked) -> None:
    """ValueError when no deployment would answer the request like this."""
    options = asked.options
    offered = {tool["function"]["name"] for tool in options.get("tools", ())}
    if options.get("tool_choice") == "none":
        offered = set()
    for call in answer.tool_calls:
        if call.name not in offered:
            raise ValueError(f"the script calls {call.name!r}, which the request does not let the model call")
    if answer.tool_calls:
        return
    if "choice" in options and answer.text not in options["choice"]:
        raise ValueError(f"the script says {answer.text!r:.100}, and the request allows {options['choice']!r:.100}")
    if "response_format" in options:
        _check_json(answer.text, options["response_format"])


def _check_json(text: str, asked_format: str | Mapping[str, Any]) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"the script says {text!r:.100}, and the request asks for JSON") from None
    wants_object = asked_format == "json_object" or (
        isinstance(asked_format, Mapping) and asked_format.get("type") == "object"
    )
    if wants_object and not isinstance(value, dict):
        raise ValueError(f"the script says {text!r:.100}, and the request asks for a JSON object")
