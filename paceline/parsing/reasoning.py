"""Splits what a model thinks from what it says: ``<think>...</think>`` at the beginning of an answer.

White space at the edges of the reasoning, and before the text that follows it, is the format's and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parsing.reader import Reader, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """``in_template``: a chat template that has all of them is of a model that reasons so."""

    name: str
    begin: str
    end: str
    in_template: tuple[str, ...]


THINK = ReasoningFormat("think", "<think>", "</think>", ("</think>",))  # DeepSeek-R1, Qwen3, GLM 4.5
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[/THINK]",))  # Magistral


class ReasoningSplitter:
    """``reasoning`` and ``text`` collect what became certain; the caller empties them."""

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        """is_open: the prompt ends within the reasoning."""
        self.reasoning, self.text = "", ""
        self.inside = is_open
        self._reader = Reader()
        self._steps: Steps[None] | None = self._run(form, is_open)
        next(self._steps)

    def push(self, text: str) -> None:
        """More of the answer."""
        for at, character in enumerate(text):
            if self._steps is None:
                self.text += text[at:]
                return
            self._send(character)

    def finish(self) -> None:
        """The answer is over."""
        while self._steps is not None:
            self._send("")

    def _send(self, character: str) -> None:
        assert self._steps is not None
        try:
            self._steps.send(character)
        except StopIteration:
            self._steps = None

    def _run(self, form: ReasoningFormat, is_open: bool) -> Steps[None]:
        reader = self._reader
        yield from reader.next_solid()
        reader.back()
        if not (yield from reader.expect(form.begin)):
            reader.rewind()
            if not is_open:
                self.text += reader.waiting()
                return
        self.inside = True
        yield from self._reasoning(form)
        self.inside = False
        self.text += yield from reader.next_solid()

    def _reasoning(self, form: ReasoningFormat) -> Steps[None]:
        space, began = "", False
        while True:
            text, _ = yield from self._reader.find((form.end,))
            if not text:  # the marker, or the end
                return
            if text.isspace():
                space += text
                continue
            self.reasoning += (space if began else "") + text
            space, began = "", True
