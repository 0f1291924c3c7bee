"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, perhaps behind ``<|python_tag|>``. Further calls
follow a semicolon, a comma or white space. An object that is no call of a known tool is text."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema
from paceline.parsing.formats.lark import json_calls, quoted
from paceline.parsing.json_call import Read, read_call, skip_closing
from paceline.parsing.reader import END, Reader, Steps
from paceline.parsing.writer import Writer

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = ";,"


def _read(reader: Reader, out: Writer) -> Steps[None]:
    how = yield from _call(reader, out)
    while how is Read.CALL and not out.over:
        yield from skip_closing(reader, out)
        reader.mark()
        c = yield from reader.next_solid()
        if c == END:
            return
        if c not in SEPARATORS:
            reader.back()
        how = yield from _call(reader, out)
    while not out.over:
        text, marker = yield from reader.find((PYTHON_TAG,))
        if not text and not marker:
            return
        out.text(text + marker)


def _call(reader: Reader, out: Writer) -> Steps[Read]:
    """What is no call is written as text."""
    c = yield from reader.next_solid()
    reader.back()
    how = Read.NO_CALL
    if c != PYTHON_TAG[0] or (yield from reader.expect(PYTHON_TAG)):
        how = yield from read_call(reader, out)
    if how is Read.NO_CALL:
        out.text(reader.taken())
    return how


def _rules(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    call, rules = json_calls(tools, "parameters")
    return CallRules("", "", call, quoted("; "), "", rules)


LLAMA3_JSON = ToolFormat("llama3_json", (PYTHON_TAG,), ('"parameters"', "ipython"), _read, _rules)
