"""DeepSeek: ``begin(call name sep {...} end)*finish`` with special tokens. V3 and R1 write ``function`` for the name,
then the name, and the arguments within a fenced block."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema
from paceline.parsing.formats.lark import alternatives, quoted, schema_rules
from paceline.parsing.json_call import Read, stream_arguments
from paceline.parsing.reader import Reader, Steps
from paceline.parsing.writer import Writer

BEGIN, FINISH = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json\n", "\n```"
MARKERS = (BEGIN, FINISH, CALL, SEPARATOR, CALL_END)


def _read(reader: Reader, out: Writer) -> Steps[None]:
    within = False  # between BEGIN and FINISH, as far as there was a call
    while not out.over:
        text, marker = yield from reader.find((BEGIN, CALL, FINISH))
        if not text and not marker:
            return
        if marker == CALL:
            how = yield from _call(reader, out)
            if how is Read.NO_CALL:
                out.text(CALL + reader.taken())
            within |= how is not Read.NO_CALL
        elif marker == BEGIN:
            yield from reader.next_solid()
            reader.back()
            if not (yield from reader.expect(CALL)):
                out.text(BEGIN + reader.taken())
                continue
            how = yield from _call(reader, out)
            if how is Read.NO_CALL:
                out.text(BEGIN + reader.taken())
            within = how is not Read.NO_CALL
        elif marker == FINISH and within:
            within = False
        else:
            out.text(text + marker)


def _call(reader: Reader, out: Writer) -> Steps[Read]:
    """After CALL, to the end of CALL_END where there is one."""
    name = yield from reader.until(SEPARATOR)
    fenced = name == "function"
    if fenced:
        name = yield from reader.until("\n")
        if not (yield from reader.expect(FENCE)):
            return Read.NO_CALL
    if name is None or (name := name.strip()) not in out.tools:
        return Read.NO_CALL
    c = yield from reader.next_solid()
    reader.back()
    if c != "{":
        return Read.NO_CALL
    out.begin(name)
    how = yield from stream_arguments(reader, out)
    if how is Read.CALL and not out.over:
        reader.mark()
        for text in (FENCE_END,) * fenced + (CALL_END,):
            if not (yield from reader.expect(text)):
                out.text(reader.taken())
                break
            reader.mark()
    return how


def _rules(tools: Sequence[ToolSchema], literal: Literal, before: str, after: str, kind: str) -> CallRules:
    arguments, rules = schema_rules(tools)
    head = f"{quoted(kind)} {literal(SEPARATOR)} " if kind else ""
    calls = [
        f"{head}{quoted(tool.name)} {before or literal(SEPARATOR)} {rule}"
        for tool, rule in zip(tools, arguments, strict=True)
    ]
    closing = f"{after} {literal(CALL_END)}"
    between = f"{closing} {quoted(chr(10)) if kind else ''} {literal(CALL)}"
    return CallRules(BEGIN, literal(CALL), alternatives(calls), between, f"{closing} {literal(FINISH)}", rules)


def _rules_v3(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    return _rules(tools, literal, quoted("\n" + FENCE), quoted(FENCE_END), "function")


def _rules_v31(tools: Sequence[ToolSchema], literal: Literal) -> CallRules:
    return _rules(tools, literal, "", "", "")


DEEPSEEK_V3 = ToolFormat("deepseek_v3", MARKERS, (BEGIN, "```json"), _read, _rules_v3)
DEEPSEEK_V31 = ToolFormat("deepseek_v31", MARKERS, (BEGIN,), _read, _rules_v31)
