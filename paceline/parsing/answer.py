"""What an answer is read as, and the parts that come out. Plain data."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.results import ToolCallPart

MakeId = Callable[[int], str]  # index of a call -> its id


@dataclass(frozen=True)
class CallableTool:
    """A tool, as far as reading a call of it needs it."""

    name: str
    text_arguments: tuple[str, ...] = ()  # arguments that are text, for formats that write text without quotes


@dataclass(frozen=True)
class AnswerFormat:
    """How the text of an answer is read. Everything that the parts depend on besides the text and the ids of calls."""

    tool_calls: str = ""  # a name of `paceline.parsing.registry.TOOL_FORMATS`; empty: no calls are read
    reasoning: str = ""  # a name of `paceline.parsing.registry.REASONING_FORMATS`; empty: none is read
    reasoning_open: bool = False  # the prompt ends within the reasoning
    tools: tuple[CallableTool, ...] = ()  # what may be called
    one_tool_call: bool = False  # the answer ends with its first call


@dataclass(frozen=True)
class AnswerParts:
    """What became certain. mixed: the same in the order of the answer, where that is not a thought, then text, then a
    part of one call; each of these is."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()
    mixed: tuple[AnswerParts, ...] = field(default=(), compare=False)

    def __add__(self, other: AnswerParts) -> AnswerParts:
        if not (self and other):
            return self if self else other
        before, after = self.mixed or (self,), other.mixed or (other,)
        steps = (*before[:-1], *_one_or_two(before[-1], after[0]), *after[1:])
        if len(steps) == 1:
            return steps[0]
        calls = _parts_of_calls(self.tool_calls, other.tool_calls)
        return AnswerParts(self.text + other.text, self.reasoning + other.reasoning, calls, steps)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


def _one_or_two(first: AnswerParts, second: AnswerParts) -> tuple[AnswerParts, ...]:
    """Both in one, where the order of what they hold does not need two."""
    kinds = [[bool(parts.reasoning), bool(parts.text), bool(parts.tool_calls)] for parts in (first, second)]
    calls = _parts_of_calls(first.tool_calls, second.tool_calls)
    last, begins = 2 - kinds[0][::-1].index(True), kinds[1].index(True)
    if begins < last or len(calls) > 1:
        return first, second
    return (AnswerParts(first.text + second.text, first.reasoning + second.reasoning, calls),)


def _parts_of_calls(first: Sequence[ToolCallPart], second: Sequence[ToolCallPart]) -> tuple[ToolCallPart, ...]:
    """One part for each call."""
    if not (first and second and first[-1].index == second[0].index):
        return (*first, *second)
    seam = replace(first[-1], arguments=first[-1].arguments + second[0].arguments)
    return (*first[:-1], seam, *second[1:])


def call_ids(prompt_ids: Sequence[int], seed: int, most_chars: int | None) -> MakeId:
    """Ids that depend on the prompt, the seed and the index alone, so that a repeated or resumed stream has the same.

    The prompt is among them because one seed may serve all turns of a conversation, whose calls must differ.
    most_chars: of an id, for templates that take no longer ones; None: OpenAI's form.
    """

    def make(index: int) -> str:
        data = array("q", prompt_ids).tobytes() + f"|{seed}|{index}".encode()
        name = hashlib.sha256(data).hexdigest()
        return f"call_{name[:24]}" if most_chars is None else name[:most_chars]

    return make
