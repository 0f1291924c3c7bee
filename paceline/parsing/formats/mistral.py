"""Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{...}``,
one after the other, perhaps with ``[CALL_ID]id`` after the name."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema, finish_call
from paceline.parsing.formats.lark import alternatives, json_calls, quoted, schema_rules
from paceline.parsing.json_call import Read, read_call, skip_closing, stream_arguments
from paceline.parsing.reader import END, MAX_NAME_CHARS, Reader, Steps
from paceline.parsing.writer import Writer

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9  # its templates take ids of this length and no others


def _read(reader: Reader, out: Writer) -> Steps[None]:
    while not out.over:
        text, marker = yield from reader.find((BEGIN,))
        if not text and not marker:
            return
        out.text(text)
        if not marker:
            continue
        c = yield from reader.next_solid()
        if c == "[":
            yield from _list(reader, out)
        else:
            reader.back()
            yield from finish_call(reader, out, (yield from _named(reader, out)), BEGIN, "")


def _list(reader: Reader, out: Writer) -> Steps[None]:
    """Calls after the opening bracket."""
    first = True
    while True:
        how = yield from read_call(reader, out)
        if how is Read.NO_CALL:
            out.text((BEGIN if first else "") + reader.taken())
        if how is not Read.CALL or out.over:
            return
        yield from skip_closing(reader, out)
        reader.mark()
        c = yield from reader.next_solid()
        if c != ",":
            if c != "]":
                reader.back()
            return
        first = False


def _named(reader: Reader, out: Writer) -> Steps[Read]:
    """A name, and arguments as an object. No tool's name has a bracket or a brace."""
    name = ""
    c = yield from reader.next()
    while c != END and c not in "[{<\n" and len(name) < MAX_NAME_CHARS:
        name += c
        c = yield from reader.next()
    reader.back()
    if name.strip() not in out.tools:
        return Read.NO_CALL
    if c == "[":
        tag = yield from reader.until("]")
        if tag == CALL_ID[:-1]:
            yield from reader.until(ARGS)
        elif tag != ARGS[:-1]:
            return Read.NO_CALL
    c = yield from reader.next_solid()
    reader.back()
    if c != "{":
        return Read.NO_CALL
    out.begin(name.strip())
    return (yield from stream_arguments(reader, out))


def _rules(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    if literal(ARGS) == quoted(ARGS):  # the tokenizer does not know the newer form
        call, rules = json_calls(tools, "arguments")
        return CallRules(BEGIN, quoted("["), call, quoted(", "), quoted("]"), rules)
    arguments, rules = schema_rules(tools)
    calls = [f"{quoted(tool.name)} {literal(ARGS)} {rule}" for tool, rule in zip(tools, arguments, strict=True)]
    return CallRules(BEGIN, "", alternatives(calls), literal(BEGIN), "", rules)


MISTRAL = ToolFormat("mistral", (BEGIN, CALL_ID, ARGS), (BEGIN,), _read, _rules, ID_CHARS)
