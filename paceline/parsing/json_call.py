"""Calls that are written as a JSON object with the tool's name and its arguments, and arguments alone."""

from __future__ import annotations

from enum import Enum

from paceline.parsing.json_scan import JsonScanner, loads, read_string, read_value, repaired
from paceline.parsing.reader import END, Reader, Steps
from paceline.parsing.writer import Writer

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")  # that some models add; their values are not looked at


class Read(Enum):
    """How reading a call ended."""

    NO_CALL = 0  # nothing was written: ``reader.taken()`` is text
    CALL = 1
    BROKEN = 2  # within the arguments; what was written of them stays


def stream_arguments(reader: Reader, out: Writer) -> Steps[Read]:
    """An object, written as it arrives into a call that has begun. What breaks it is read again."""
    scanner = JsonScanner()
    c = yield from reader.next_solid()
    if c == "{":
        while True:
            within = scanner.in_string
            if c == END or not scanner.feed(c):
                break
            out.arguments(repaired(c, within))
            if scanner.done:
                out.end()
                return Read.CALL
            c = yield from reader.next()
    reader.back()
    out.end()
    return Read.BROKEN


def read_call(reader: Reader, out: Writer) -> Steps[Read]:
    """``{"name": ..., "arguments": {...}}``. The keys may come in any order; arguments stream once the name is
    known."""
    name, held, began = "", "", False
    c = yield from reader.next_solid()
    comma = c == "{"
    while comma:
        c = yield from reader.next_solid()
        if c != '"' or (key := (yield from read_string(reader))) is None:
            break
        if (yield from reader.next_solid()) != ":":
            reader.back()
            return Read.NO_CALL if not began else Read.CALL
        if key == "name" and not name:
            c = yield from reader.next_solid()
            name = ((yield from read_string(reader)) if c == '"' else "") or ""
            if name not in out.tools:
                return Read.NO_CALL
        elif key in ARGUMENTS and not held:
            c = yield from reader.next_solid()
            reader.back()
            if name and c == "{":
                out.begin(name)
                began, held = True, "{}"
                if (yield from stream_arguments(reader, out)) is Read.BROKEN:
                    return Read.BROKEN
                if out.over:
                    return Read.CALL
            elif not (held := _object((yield from read_value(reader)))):
                return Read.NO_CALL
        elif key not in OTHER_KEYS or (yield from read_value(reader)) is None:
            return Read.CALL if began else Read.NO_CALL
        c = yield from reader.next_solid()
        comma = c == ","
    if c != "}":
        reader.back()
    if began:
        return Read.CALL  # the arguments are whole, whatever follows
    if c != "}" or not name:
        return Read.NO_CALL
    out.begin(name)
    out.arguments(held or "{}")
    out.end()
    return Read.CALL


def _object(raw: str | None) -> str:
    """Arguments that are no plain object: text that holds one, or null for none. Empty when they are neither."""
    value = loads(raw) if raw else None
    if raw == "null":
        return "{}"
    if isinstance(value, str):
        raw, value = value, loads(value)
    return raw if raw and isinstance(value, dict) else ""


def skip_closing(reader: Reader, out: Writer, end: str = "") -> Steps[None]:
    """White space and ``end`` after a call, and braces too many before it, where models miscount."""
    while (yield from reader.next_solid()) == "}":
        pass
    reader.back()
    reader.mark()
    if not (yield from reader.expect(end)):
        out.text(reader.taken())
