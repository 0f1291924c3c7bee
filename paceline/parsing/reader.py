"""Characters one by one, for parsers that are written as if the whole text were there.

A parser is a generator: it takes a character by ``yield from reader.next()`` and waits there until one has arrived. It
never sees how the text was cut into pieces, so its parts cannot depend on that.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, str, T]  # is sent one character a time; an empty text is the end, and comes again
END = ""
SPACE = " \t\r\n"
MAX_NAME_CHARS = 256  # read before a name counts as none


class Reader:
    """The next character, and those read since the last ``mark``."""

    def __init__(self) -> None:
        self._queue = self._last = ""
        self._taken: list[str] = []

    def next(self) -> Steps[str]:
        """The next character; END when there is none any more."""
        if self._queue:
            character, self._queue = self._queue[0], self._queue[1:]
        else:
            character = yield
        if character:
            self._taken.append(character)
        self._last = character
        return character

    def back(self) -> None:
        """Read the last character again. Nothing at the end, nor when it was given back already."""
        if self._last:
            self._queue, self._last = self._taken.pop() + self._queue, ""

    def rewind(self) -> None:
        """Read everything since ``mark`` again."""
        self._queue, self._last = self.taken() + self._queue, ""
        self._taken.clear()

    def waiting(self) -> str:
        """What is to be read again, which is then not."""
        text, self._queue, self._last = self._queue, "", ""
        return text

    def mark(self) -> None:
        """``taken`` begins here."""
        self._taken.clear()

    def taken(self) -> str:
        """What was read since ``mark``."""
        return "".join(self._taken)

    def next_solid(self) -> Steps[str]:
        """The next character that is no white space."""
        while True:
            character = yield from self.next()
            if character == END or character not in SPACE:
                return character

    def expect(self, text: str) -> Steps[bool]:
        """Whether ``text`` is next. What differs is read again."""
        for wanted in text:
            character = yield from self.next()
            if character != wanted:
                self.back()
                return False
        return True

    def until(self, end: str, most: int = MAX_NAME_CHARS) -> Steps[str | None]:
        """The text before ``end``, which is taken too; None when it does not come within ``most`` characters."""
        text = ""
        while not text.endswith(end):
            character = yield from self.next()
            if character == END or len(text) == most + len(end):
                self.back()
                return None
            text += character
        return text[: -len(end)]

    def find(self, markers: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Read up to text that begins no marker, or to the end of one, and mark there.

        (text, "") or ("", marker); ("", "") is the end."""
        window = yield from self.next()
        while window and window not in markers and any(marker.startswith(window) for marker in markers):
            if not (character := (yield from self.next())):
                break
            window += character
        self.mark()
        if window in markers:
            return "", window
        self._queue = window[1:] + self._queue
        return window[:1], ""

    def one_of(self, markers: tuple[str, ...]) -> Steps[str]:
        """The marker that is next; empty when none is. What differs is read again."""
        window = ""
        while window not in markers:
            character = yield from self.next()
            window += character
            if not character or not any(marker.startswith(window) for marker in markers):
                self.back()
                return ""
        return window
