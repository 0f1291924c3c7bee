"""What a format of tool calls is: how calls are read, and how a grammar writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.parsing.json_call import Read, read_call, skip_closing
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.writer import Writer

Literal = Callable[[str], str]  # a text -> what a grammar calls it: a quoted text, or the special token that it is


@dataclass(frozen=True)
class ToolSchema:
    """A tool as a grammar needs it."""

    name: str
    schema: str  # JSON Schema of its arguments, as JSON; empty: any object


@dataclass(frozen=True)
class CallRules:
    """Lark rules of a format. An answer is ``begin``, calls with ``between`` between them, and ``end``."""

    begin: str  # what tells a call from text, e.g. <tool_call>; empty: calls are all of the answer
    opening: str  # an expression after ``begin`` and before the first call
    call: str  # an expression
    between: str  # an expression
    end: str  # an expression
    rules: tuple[str, ...]  # that the expressions refer to


@dataclass(frozen=True)
class ToolFormat:
    """One way in which models write calls.

    ``markers`` are the texts that tell calls from text. A tokenizer may have them as special tokens, which are left
    out of text otherwise. ``in_template``: a chat template that has all of them teaches this format.
    """

    name: str
    markers: tuple[str, ...]
    in_template: tuple[str, ...]
    read: Callable[[Reader, Writer], Steps[None]]  # reads to the end of the answer
    rules: Callable[[Sequence[ToolSchema], Literal], CallRules]
    most_id_chars: int | None = None  # of a call's id; None: any


def read_marked_calls(reader: Reader, out: Writer, begin: str, end: str) -> Steps[None]:
    """Text and JSON calls between ``begin`` and ``end``."""
    while not out.over:
        text, marker = yield from reader.find((begin,))
        if not text and not marker:
            return
        out.text(text)
        if marker:
            yield from finish_call(reader, out, (yield from read_call(reader, out)), begin, end)


def finish_call(reader: Reader, out: Writer, how: Read, begin: str, end: str) -> Steps[None]:
    """What stands behind a call; what was none is text."""
    if how is Read.NO_CALL:
        out.text(begin + reader.taken())
    elif how is Read.CALL and not out.over:
        yield from skip_closing(reader, out, end)
