"""What a parser of tool calls writes to: text, and calls by their pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.parsing.answer import AnswerParts, CallableTool, MakeId
from paceline.results import ToolCallPart


class Writer:
    """White space before, between and after calls belongs to the format: it is dropped there, and only there.

    Life of a call: ``begin`` -> ``arguments``, any number of times -> ``end``. A call that breaks within its arguments
    ends too; what was written of them stays.
    """

    def __init__(self, tools: Iterable[CallableTool], make_id: MakeId, one_call: bool) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self.over = False  # nothing more is part of the answer
        self._make_id, self._one_call = make_id, one_call
        self._written: list[tuple[ToolCallPart | None, list[str]]] = []  # pieces of text, or of a call's arguments
        self._any_text = False
        self._space: list[str] = []

    def text(self, text: str) -> None:
        """What is no call."""
        if text.isspace():
            self._space.append(text)
        elif text:
            solid = text.rstrip()
            if not self.num_calls or self._any_text:  # else it stands between a call and the first text
                self._write(None, *self._space)
            else:
                solid = solid.lstrip()
            self._any_text = True
            self._write(None, solid)
            self._space = [text[len(text.rstrip()) :]]

    def begin(self, name: str) -> None:
        """A call of a known tool."""
        self._space.clear()
        self._written.append((ToolCallPart(self.num_calls, self._make_id(self.num_calls), name), []))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """The next piece of the open call's arguments."""
        self._write(ToolCallPart(self.num_calls - 1), text)

    def end(self) -> None:
        """The call is over."""
        self.over = self._one_call

    def finish(self) -> None:
        """The answer is over."""
        if not self.num_calls:
            self._write(None, *self._space)
        self._space.clear()

    def take(self) -> AnswerParts:
        """What was written since the last time."""
        parts = AnswerParts()
        for part, pieces in self._written:
            piece = "".join(pieces)
            parts += AnswerParts(piece) if part is None else AnswerParts("", "", (replace(part, arguments=piece),))
        self._written.clear()
        return parts

    def _write(self, part: ToolCallPart | None, *pieces: str) -> None:
        """part: of whose arguments the pieces are; None: of the text."""
        if not self._written or (self._written[-1][0] is None) != (part is None):
            self._written.append((part, []))
        self._written[-1][1].extend(pieces)
