"""Qwen3-Coder: ``<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>``.
Text has no quotes; which arguments are text is what their schema says."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema, finish_call
from paceline.parsing.formats.lark import quoted, tagged_calls
from paceline.parsing.formats.tagged import Tagged
from paceline.parsing.json_call import Read
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.writer import Writer

BEGIN, FINISH = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
NEWLINE = quoted("\n")


def _read(reader: Reader, out: Writer) -> Steps[None]:
    while not out.over:
        text, marker = yield from reader.find((BEGIN, FUNCTION))
        if not text and not marker:
            return
        out.text(text)
        if marker:
            how = yield from _call(reader, out, marker == FUNCTION)
            yield from finish_call(reader, out, how, marker, FINISH if marker == BEGIN else "")


def _call(reader: Reader, out: Writer, in_function: bool) -> Steps[Read]:
    if not in_function:
        yield from reader.next_solid()
        reader.back()
        if not (yield from reader.expect(FUNCTION)):
            return Read.NO_CALL
    name = yield from reader.until(">")
    if name is None or (name := name.strip()) not in out.tools:
        return Read.NO_CALL
    call = Tagged(out, name)
    while True:
        yield from reader.next_solid()
        reader.back()
        reader.mark()
        marker = yield from reader.one_of((PARAMETER, FUNCTION_END))
        if marker == FUNCTION_END:
            return call.end()
        key = (yield from reader.until(">")) if marker else None
        if key is None:
            return call.broken(reader)
        yield from call.value(reader, key.strip(), PARAMETER_END, own_lines=True)


def _rules(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    def field(key: str, value: str) -> str:
        return f"{quoted(f'{PARAMETER}{key}>')} {NEWLINE} {value} {NEWLINE}"

    call, rules = tagged_calls(
        tools, lambda name: f"{quoted(f'{FUNCTION}{name}>')} {NEWLINE}", field, "\n" + PARAMETER_END, literal
    )
    after = f"{quoted(FUNCTION_END)} {NEWLINE} {literal(FINISH)}"
    between = f"{after} {NEWLINE} {literal(BEGIN)} {NEWLINE}"
    return CallRules(BEGIN, NEWLINE, call, between, after, rules)


QWEN3_CODER = ToolFormat("qwen3_coder", (BEGIN, FINISH), (BEGIN, FUNCTION, PARAMETER), _read, _rules)
