"""JSON, character by character (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.parsing.reader import END, SPACE, Reader, Steps

MAX_DEPTH = 128  # objects and lists within each other
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Follows one object or list. ``feed`` says whether a character may come next; ``done`` after the last one."""

    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # the closing brackets that are due
        self._state = self._value
        self._is_key = False
        self._hex_left = 0
        self._scalar = ""

    def feed(self, character: str) -> bool:
        """False: no JSON goes on so. Nothing may be fed after that, or after the end."""
        return self._state(character)

    @property
    def in_string(self) -> bool:
        """Whether the next character is within a text."""
        return self._state == self._string

    def _value(self, c: str) -> bool:
        """A value is due."""
        if c in SPACE:
            return True
        if c in "{[":
            self._open.append("}" if c == "{" else "]")
            self._state = self._first
            return len(self._open) <= MAX_DEPTH
        if c == '"':
            self._is_key, self._state = False, self._string
            return True
        self._scalar, self._state = c, self._in_scalar
        return c in _SCALAR_CHARACTERS

    def _first(self, c: str) -> bool:
        """After an opening bracket."""
        if c in SPACE:
            return True
        if c == self._open[-1]:
            return self._close()
        return self._key(c) if self._open[-1] == "}" else self._value(c)

    def _key(self, c: str) -> bool:
        """A key is due."""
        if c in SPACE:
            self._state = self._key
            return True
        self._is_key, self._state = True, self._string
        return c == '"'

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._state = self._value
        return c in SPACE or c == ":"

    def _after(self, c: str) -> bool:
        """After a value within an object or a list."""
        if c == ",":
            self._state = self._key if self._open[-1] == "}" else self._value
            return True
        return c in SPACE or (c == self._open[-1] and self._close())

    def _string(self, c: str) -> bool:
        if c == '"':
            self._state = self._colon if self._is_key else self._after
        elif c == "\\":
            self._state = self._escape
        return True

    def _escape(self, c: str) -> bool:
        self._hex_left = 4
        self._state = self._unicode if c == "u" else self._string
        return c == "u" or c in _ESCAPED

    def _unicode(self, c: str) -> bool:
        self._hex_left -= 1
        if not self._hex_left:
            self._state = self._string
        return c in _HEX

    def _in_scalar(self, c: str) -> bool:
        if c in _SCALAR_CHARACTERS:
            self._scalar += c
            return True
        self._state = self._after
        return _SCALAR.fullmatch(self._scalar) is not None and self._after(c)

    def _close(self) -> bool:
        self._open.pop()
        self.done, self._state = not self._open, self._after
        return True


def repaired(character: str, in_string: bool) -> str:
    """Models write line breaks into texts as they are, which JSON does not allow."""
    return json.dumps(character)[1:-1] if in_string and character < " " else character


def read_string(reader: Reader) -> Steps[str | None]:
    """A text whose first quote was read; None when it is none."""
    raw = '"'
    escaped = False
    while True:
        c = yield from reader.next()
        if c == END:
            return None
        raw += c
        if c == '"' and not escaped:
            break
        escaped = c == "\\" and not escaped
    value = loads(raw)
    return value if isinstance(value, str) else None


def read_value(reader: Reader) -> Steps[str | None]:
    """Any value, as it is written; None when it is none."""
    c = yield from reader.next_solid()
    if c == '"':
        text = yield from read_string(reader)
        return None if text is None else json.dumps(text, ensure_ascii=False)
    if c and c in "{[":
        return (yield from _read_container(reader, c))
    raw = ""
    while c and c in _SCALAR_CHARACTERS:
        raw += c
        c = yield from reader.next()
    reader.back()
    return raw if _SCALAR.fullmatch(raw) else None


def _read_container(reader: Reader, first: str) -> Steps[str | None]:
    scanner, raw = JsonScanner(), []
    c = first
    while True:
        within = scanner.in_string
        if c == END or not scanner.feed(c):
            reader.back()
            return None
        raw.append(repaired(c, within))
        if scanner.done:
            return "".join(raw)
        c = yield from reader.next()


def loads(text: str) -> Any:
    """The value, or None where there is none. Line breaks within texts pass."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
