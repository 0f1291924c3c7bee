"""GLM 4.5: ``<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n...</tool_call>``. Text has no
quotes; which arguments are text is what their schema says."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema, finish_call
from paceline.parsing.formats.lark import quoted, tagged_calls
from paceline.parsing.formats.tagged import Tagged
from paceline.parsing.json_call import Read
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.writer import Writer

BEGIN, FINISH = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read(reader: Reader, out: Writer) -> Steps[None]:
    while not out.over:
        text, marker = yield from reader.find((BEGIN,))
        if not text and not marker:
            return
        out.text(text)
        if marker:
            yield from finish_call(reader, out, (yield from _call(reader, out)), BEGIN, "")


def _call(reader: Reader, out: Writer) -> Steps[Read]:
    name = ""
    c = yield from reader.next_solid()
    while c and c not in "<\n" and len(name) < 256:
        name += c
        c = yield from reader.next()
    reader.back()
    if (name := name.strip()) not in out.tools:
        return Read.NO_CALL
    call = Tagged(out, name)
    while True:
        yield from reader.next_solid()
        reader.back()
        reader.mark()
        marker = yield from reader.one_of((KEY, FINISH))
        if marker == FINISH:
            return call.end()
        key = (yield from reader.until(KEY_END)) if marker else None
        yield from reader.next_solid()
        reader.back()
        if key is None or not (yield from reader.expect(VALUE)):
            return call.broken(reader)
        yield from call.value(reader, key.strip(), VALUE_END)


def _rules(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    def field(key: str, value: str) -> str:
        return f"{literal(KEY)} {quoted(key)} {literal(KEY_END)} {NEWLINE} {literal(VALUE)} {value} {NEWLINE}"

    call, rules = tagged_calls(tools, lambda name: f"{quoted(name)} {NEWLINE}", field, VALUE_END, literal)
    between = f"{literal(FINISH)} {NEWLINE} {literal(BEGIN)}"
    return CallRules(BEGIN, "", call, between, literal(FINISH), rules)


NEWLINE = quoted("\n")
GLM45 = ToolFormat("glm45", (BEGIN, FINISH, KEY, KEY_END, VALUE, VALUE_END), (BEGIN, KEY, VALUE), _read, _rules)
