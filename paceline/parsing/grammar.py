"""Grammars for answers that must call tools, or whose calls must fit: Lark source for llguidance.

A grammar says which texts an answer may be; it is applied token by token on the nodes. What it lets through is what the
parser of the same format reads as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.errors import InvalidRequest
from paceline.parsing.formats.base import CallRules, Literal, ToolFormat, ToolSchema
from paceline.parsing.formats.lark import ANY_OBJECT, json_rule, quoted
from paceline.parsing.reasoning import ReasoningFormat
from paceline.request import Grammar, GrammarKind


class Calls(Enum):
    """What an answer may be."""

    FREE = 0  # text, in which calls may begin; a call must fit
    SOME = 1  # one call or more, and nothing else
    OR_BODY = 2  # calls and nothing else, or a body


@dataclass(frozen=True)
class Thinking:
    """What may stand before everything else."""

    form: ReasoningFormat
    is_open: bool  # it has begun in the prompt


def call_grammar(
    form: ToolFormat,
    tools: Sequence[ToolSchema],
    literal: Literal,
    *,
    calls: Calls,
    one: bool = False,
    body: Grammar | None = None,
    thinking: Thinking | None = None,
) -> Grammar:
    """The grammar of an answer. literal: see `formats.base`. one: at most one call. body: of Calls.OR_BODY.

    Raises InvalidRequest for a schema or a body that cannot be part of one.
    """
    rules = form.rules(tools, literal)
    lines = [f"call: {rules.call}", *rules.rules]
    more = "" if one else f"({rules.between} call)*"
    tail = f"{rules.opening} call {more} {rules.end}"
    if calls is Calls.FREE:
        lines += _free(rules, tail, literal, thinking)
    else:
        begin = literal(rules.begin) if rules.begin else ""
        lines.append(f"calls: {begin} {tail}")
        lines.append("answer: calls" if calls is Calls.SOME else "answer: calls | body")
        if calls is Calls.OR_BODY:
            assert body is not None
            lines.append(f"body: {_body(body)}")
    return _whole(lines, literal, thinking)


def thinking_grammar(body: Grammar, literal: Literal, thinking: Thinking) -> Grammar:
    """``body`` after the reasoning, which is free."""
    return _whole([f"answer: {_body(body)}"], literal, thinking)


def _whole(lines: list[str], literal: Literal, thinking: Thinking | None) -> Grammar:
    start = ["start: answer"] if thinking is None else _thinking(thinking, literal)
    return Grammar(GrammarKind.EBNF, "\n".join([*start, *lines]) + "\n")


def _free(rules: CallRules, tail: str, literal: Literal, thinking: Thinking | None) -> list[str]:
    """Text, and calls that fit wherever one begins."""
    if not rules.begin:  # a call is all of the answer; text begins differently
        thought = "" if thinking is None or thinking.is_open else re.escape(thinking.form.begin[0])
        other = f"/[^{{{thought} \\t\\r\\n](.|\\n)*/"
        return [f"answer: calls | TEXT | {other}", f"calls: {tail}", "TEXT: /[ \\t\\r\\n]*/"]
    if literal(rules.begin) != quoted(rules.begin):  # a token of its own, which no text has
        return [f"answer: (TEXT? {literal(rules.begin)} {tail})* TEXT?", "TEXT: /(.|\\n)+/"]
    return [
        f"answer: (before {tail})* TEXT",
        f"before[lazy]: TEXT {quoted(rules.begin)}",
        "TEXT: /(.|\\n)*/",
    ]


def _thinking(thinking: Thinking, literal: Literal) -> list[str]:
    form = thinking.form
    if literal(form.end) != quoted(form.end):
        rest = [f"thought: (THOUGHT? {literal(form.end)}) SPACE", "THOUGHT: /(.|\\n)+/"]
    else:
        rest = ["thought: thought_end SPACE", f"thought_end[lazy]: /(.|\\n)*/ {quoted(form.end)}"]
    first = "start: thought answer" if thinking.is_open else f"start: ({literal(form.begin)} thought)? answer"
    return [first, *rest, "SPACE: /[ \\n]{0,4}/"]


def _body(body: Grammar) -> str:
    """A grammar as an expression."""
    match body.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_rule(body.source)
        case GrammarKind.JSON_OBJECT:
            return json_rule(ANY_OBJECT)
        case GrammarKind.CHOICE:
            return " | ".join(quoted(text) for text in json.loads(body.source))
        case GrammarKind.REGEX:
            return f"/{body.source.replace('/', chr(92) + '/')}/"
        case _:
            raise InvalidRequest("grammar", "cannot go with tools, nor with a model that thinks first")
