"""Hermes and Qwen: ``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema, read_marked_calls
from paceline.parsing.formats.lark import json_calls, quoted
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.writer import Writer

BEGIN, FINISH = "<tool_call>", "</tool_call>"


def _read(reader: Reader, out: Writer) -> Steps[None]:
    return read_marked_calls(reader, out, BEGIN, FINISH)


def _rules(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    call, rules = json_calls(tools, "arguments")
    after = f"{quoted(chr(10))} {literal(FINISH)}"
    between = f"{after} {quoted(chr(10))} {literal(BEGIN)} {quoted(chr(10))}"
    return CallRules(BEGIN, quoted("\n"), call, between, after, rules)


HERMES = ToolFormat("hermes", (BEGIN, FINISH), (BEGIN, "arguments"), _read, _rules)
