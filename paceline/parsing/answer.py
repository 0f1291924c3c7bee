"""What an answer is read as, and the parts that come out. Plain data."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    """What became certain."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()

    def __add__(self, other: AnswerParts) -> AnswerParts:
        calls = self.tool_calls + other.tool_calls
        if self.tool_calls and other.tool_calls and self.tool_calls[-1].index == other.tool_calls[0].index:
            # One part for each call: clients of HTTP read the first part of an event alone.
            last, more = self.tool_calls[-1], other.tool_calls[0]
            seam = replace(last, arguments=last.arguments + more.arguments)
            calls = (*self.tool_calls[:-1], seam, *other.tool_calls[1:])
        return AnswerParts(self.text + other.text, self.reasoning + other.reasoning, calls)


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
