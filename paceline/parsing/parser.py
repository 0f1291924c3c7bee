"""The text of an answer in, its parts out: reasoning, text, and calls of tools.

The parts, joined, are a function of the whole text: how it was cut into pieces never shows. What is no well-formed call
of a known tool is text, to the last character. A call that breaks within its arguments keeps those that were out.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.answer import AnswerFormat, AnswerParts, MakeId, call_ids
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.reasoning import ReasoningSplitter
from paceline.parsing.registry import REASONING_FORMATS, TOOL_FORMATS
from paceline.parsing.writer import Writer


def make_parser(form: AnswerFormat, prompt_ids: Sequence[int], seed: int) -> AnswerParser:
    """A parser for one choice, whose calls get the ids of `call_ids`."""
    most_chars = TOOL_FORMATS[form.tool_calls].most_id_chars if form.tool_calls else None
    return AnswerParser(form, call_ids(prompt_ids, seed, most_chars))


class AnswerParser:
    """``push`` text as it becomes certain, then ``finish``. ``over``: the answer ends here, the rest is not read."""

    def __init__(self, form: AnswerFormat, make_id: MakeId) -> None:
        """Both names of ``form`` must be known, or empty."""
        self._splitter = (
            ReasoningSplitter(REASONING_FORMATS[form.reasoning], form.reasoning_open) if form.reasoning else None
        )
        self._out = Writer(form.tools, make_id, form.one_tool_call)
        self._steps: Steps[None] | None = None
        if form.tool_calls:
            self._steps = TOOL_FORMATS[form.tool_calls].read(Reader(), self._out)
            next(self._steps)
        self._plain = self._steps is None

    @property
    def over(self) -> bool:
        """Whether the one call that the answer may have is complete."""
        return self._out.over

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._splitter is not None and self._splitter.inside

    @property
    def num_calls(self) -> int:
        """Calls that began."""
        return self._out.num_calls

    def push(self, text: str) -> AnswerParts:
        """What became certain."""
        reasoning = ""
        if self._splitter is not None:
            self._splitter.push(text)
            text, reasoning = self._split()
        if self._plain:
            return AnswerParts(text, reasoning)
        return AnswerParts("", reasoning) + self._feed(text)

    def finish(self) -> AnswerParts:
        """What was withheld."""
        text = reasoning = ""
        if self._splitter is not None:
            self._splitter.finish()
            text, reasoning = self._split()
        if self._plain:
            return AnswerParts(text, reasoning)
        parts = AnswerParts("", reasoning) + self._feed(text)
        while self._steps is not None:
            self._send("")
        self._out.finish()
        return parts + self._out.take()

    def _split(self) -> tuple[str, str]:
        assert self._splitter is not None
        text, reasoning = self._splitter.text, self._splitter.reasoning
        self._splitter.text = self._splitter.reasoning = ""
        return text, reasoning

    def _feed(self, text: str) -> AnswerParts:
        for character in text:
            if self._steps is None:
                break
            self._send(character)
        return self._out.take()

    def _send(self, character: str) -> None:
        assert self._steps is not None
        try:
            self._steps.send(character)
        except StopIteration:
            self._steps = None
