"""Arguments that are written as tags, one for each: they become a JSON object as they arrive."""

from __future__ import annotations

import json
from collections.abc import Callable

from paceline.parsing.json_call import Read
from paceline.parsing.json_scan import loads
from paceline.parsing.reader import END, Reader, Steps
from paceline.parsing.writer import Writer


class Tagged:
    """One call. Text streams; another value is written when it is whole, as JSON where it is JSON, else as text."""

    def __init__(self, out: Writer, name: str) -> None:
        self._out, self._text = out, out.tools[name].text_arguments
        self._written = False
        out.begin(name)

    def value(self, reader: Reader, key: str, end: str, *, own_lines: bool = False) -> Steps[None]:
        """A value up to ``end``. own_lines: it stands on lines of its own, whose breaks are not part of it."""
        self._out.arguments((", " if self._written else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._written = True
        if key in self._text:
            self._out.arguments('"')
            if (yield from self._pieces(reader, end, own_lines, self._quoted)):
                self._out.arguments('"')
            return
        pieces: list[str] = []
        whole = yield from self._pieces(reader, end, own_lines, pieces.append)
        raw = "".join(pieces)
        if not whole:
            self._out.arguments(raw)
            return
        value = loads(raw)
        is_json = value is not None or raw.strip() == "null"
        self._out.arguments(json.dumps(value if is_json else raw, ensure_ascii=False))

    def end(self) -> Read:
        """All arguments were read."""
        self._out.arguments("}" if self._written else "{}")
        self._out.end()
        return Read.CALL

    def broken(self, reader: Reader) -> Read:
        """Something else stands where an argument is due: the call ends, and what was read is text."""
        self._out.end()
        self._out.text(reader.taken())
        return Read.BROKEN

    def _quoted(self, text: str) -> None:
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _pieces(self, reader: Reader, end: str, own_lines: bool, write: Callable[[str], None]) -> Steps[bool]:
        """What is before ``end``; False when that never comes."""
        held = ""  # a line break that may be the last
        first = own_lines
        while True:
            text, marker = yield from reader.find((end,))
            if marker or text == END:
                break
            if first and text == "\n":
                first = False
                continue
            first = False
            write(held)
            held = text if own_lines and text == "\n" else ""
            write("" if held else text)
        if not marker:
            write(held)
        return bool(marker)
