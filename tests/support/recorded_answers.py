"""Answers as models write them, one set for each format of tool calls, and what they mean."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.parsing.answer import AnswerFormat, AnswerParts, CallableTool
from paceline.parsing.parser import AnswerParser
from paceline.results import joined

TOOLS = (CallableTool("get_weather", ("city", "note")), CallableTool("add"), CallableTool("now"))
BEGIN, FINISH = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class Recorded:
    """One answer. ``calls``: name and arguments of each, as they must come out."""

    tool_calls: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    said: str = ""
    reasoning: str = ""
    thinks: str = ""
    is_open: bool = False

    @property
    def form(self) -> AnswerFormat:
        return AnswerFormat(self.tool_calls, self.thinks, self.is_open, TOOLS)


def call_id(index: int) -> str:
    return f"id-{index}"


def read(form: AnswerFormat, pieces: Sequence[str]) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
    """Text, reasoning, and id, name and arguments of the calls."""
    parser, parts = AnswerParser(form, call_id), AnswerParts()
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    calls = joined(parts.tool_calls)
    return parts.text, parts.reasoning, tuple((call.id, call.name, call.arguments) for call in calls)


def groupings(text: str, count: int, seed: int) -> Iterator[list[str]]:
    """``text`` cut at random, from single characters to large pieces: ``count`` times, and each way once."""
    rng, seen = random.Random(seed), set[tuple[str, ...]]()
    for _ in range(count):
        longest = rng.choice([1, 2, 3, 5, 9, 30, 200])
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, longest)
            pieces.append(text[at : at + size])
            at += size
        if tuple(pieces) not in seen:
            seen.add(tuple(pieces))
            yield pieces


PARIS, SUM = '{"city": "Paris <b>", "days": [1, {"x": null}]}', '{"a": 1.5e3, "b": -2}'
WELL_FORMED = (
    Recorded(
        "hermes",
        f'I look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {SUM}, "name": "add"}}\n</tool_call>',
        (("get_weather", PARIS), ("add", SUM)),
        "I look.",
    ),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>\n\nDone.', (("now", "{}"),), "Done."),
    Recorded("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', (("add", '{"a": 1}'),)),
    Recorded("hermes", '<tool_call>{"name": "add", "arguments": {"a": {}}</tool_call>', (("add", '{"a": {}}'),)),
    Recorded("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', (("add", '{"a": 1}'),)),
    Recorded(
        "hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}</tool_call>', (("add", '{"a": "x\\ny"}'),)
    ),
    Recorded("hermes", "No call: a < b, <tool, </tool_call>.", said="No call: a < b, <tool, </tool_call>."),
    Recorded("hermes", " \n two words \n", said=" \n two words \n"),
    Recorded(
        "hermes",
        '<think>\nhm <x\n\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (("now", "{}"),),
        reasoning="hm <x",
        thinks="think",
    ),
    Recorded("", "hm </thin\n</think>\n\nHello.", said="Hello.", reasoning="hm </thin", thinks="think", is_open=True),
    Recorded("", "\n</think>\n\nHello.", said="Hello.", thinks="think", is_open=True),
    Recorded("", "</think>Hello.", said="Hello.", thinks="think", is_open=True),
    Recorded("", "<think>\n\n</think>\n\nHello.", said="Hello.", thinks="think", is_open=True),
    Recorded("", "\n <thinner> Hello.", said="\n <thinner> Hello.", thinks="think"),
    Recorded("", "Hello <think>.", said="Hello <think>.", thinks="think"),
    Recorded("", "[THINK]hm[/THINK]Hello", said="Hello", reasoning="hm", thinks="mistral"),
    Recorded("", "cut off", reasoning="cut off", thinks="think", is_open=True),
    Recorded(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "add", "parameters": {SUM}}}',
        (("get_weather", PARIS), ("add", SUM)),
    ),
    Recorded("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', (("add", '{"a": 1}'),)),
    Recorded("llama3_json", '\n{"type": "function", "name": "add", "parameters": {}}', (("add", "{}"),)),
    Recorded("llama3_json", '{"city": "Paris"}', said='{"city": "Paris"}'),
    Recorded("llama3_json", 'Say {"name": "add"}.', said='Say {"name": "add"}.'),
    Recorded(
        "mistral",
        f'I look. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "add", "arguments": {SUM}}}]',
        (("get_weather", PARIS), ("add", SUM)),
        "I look.",
    ),
    Recorded(
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{SUM}",
        (("get_weather", PARIS), ("add", SUM)),
    ),
    Recorded(
        "deepseek_v3",
        f"I look.{BEGIN}{CALL}function{SEP}get_weather\n```json\n{PARIS}\n```{CALL_END}\n"
        f"{CALL}function{SEP}add\n```json\n{SUM}\n```{CALL_END}{FINISH}",
        (("get_weather", PARIS), ("add", SUM)),
        "I look.",
    ),
    Recorded(
        "deepseek_v31",
        f"{BEGIN}{CALL}get_weather{SEP}{PARIS}{CALL_END}{CALL}add{SEP}{SUM}{CALL_END}{FINISH}",
        (("get_weather", PARIS), ("add", SUM)),
    ),
    Recorded(
        "glm45",
        '\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12 "a"\n<b></arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        (("get_weather", '{"city": "12 \\"a\\"\\n<b>", "days": [1, 2]}'), ("now", "{}")),
        "\nI look.",
    ),
    Recorded(
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>not json</arg_value>\n</tool_call>",
        (("add", '{"a": "not json"}'),),
    ),
    Recorded(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n"
        "[1]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (("get_weather", '{"city": "New\\nYork", "days": [1]}'), ("now", "{}")),
        "I look.",
    ),
)
# What begins like a call and is none, or breaks off: text, and what was out of a call's arguments.
MALFORMED = (
    Recorded(
        "hermes",
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        said='<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
    ),
    Recorded("hermes", "<tool_call>\nhello</tool_call>", said="<tool_call>\nhello</tool_call>"),
    Recorded("hermes", '<tool_call>{"name": "add", "what": 1}', said='<tool_call>{"name": "add", "what": 1}'),
    Recorded(
        "hermes", '<tool_call>{"name": "add", "arguments": [1]}', said='<tool_call>{"name": "add", "arguments": [1]}'
    ),
    Recorded("hermes", '<tool_call>{"na', said='<tool_call>{"na'),
    Recorded("hermes", "<tool_call><tool_call>{} <tool_", said="<tool_call><tool_call>{} <tool_"),
    Recorded("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b', (("add", '{"a": 1, "b'),)),
    Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>',
        (("add", '{"a": tru'),),
        "}}</tool_call>",
    ),
    Recorded("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\x"}}', (("add", '{"a": "\\'),), 'x"}}'),
    Recorded(
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {"[" * 300}',
        said=f'<tool_call>{{"name": "add", "arguments": {"[" * 300}',
    ),
    Recorded("llama3_json", '{"name": "add", "parameters": 3}', said='{"name": "add", "parameters": 3}'),
    Recorded(
        "llama3_json", '{"name": "add", "parameters": {}}; {"name": "x"} bye', (("add", "{}"),), '; {"name": "x"} bye'
    ),
    Recorded("mistral", "[TOOL_CALLS] hello", said="[TOOL_CALLS] hello"),
    Recorded("mistral", '[TOOL_CALLS]nope[ARGS]{"a": 1}', said='[TOOL_CALLS]nope[ARGS]{"a": 1}'),
    Recorded("mistral", '[TOOL_CALLS] [{"name": "nope"}]', said='[TOOL_CALLS] [{"name": "nope"}]'),
    Recorded(
        "deepseek_v3",
        f"{BEGIN}{CALL}function{SEP}nope\n```json\n{{}}",
        said=f"{BEGIN}{CALL}function{SEP}nope\n```json\n{{}}",
    ),
    Recorded("deepseek_v31", f"{BEGIN}x{FINISH}", said=f"{BEGIN}x{FINISH}"),
    Recorded("deepseek_v31", f"{BEGIN}{CALL}{'y' * 400}", said=f"{BEGIN}{CALL}{'y' * 400}"),
    Recorded("glm45", "<tool_call>nope\n<arg_key>", said="<tool_call>nope\n<arg_key>"),
    Recorded("glm45", "<tool_call>add\n<arg_key>a</arg_key>\nhm", (("add", ""),), "<arg_key>a</arg_key>\nhm"),
    Recorded("qwen3_coder", "<tool_call>\n<function=nope>", said="<tool_call>\n<function=nope>"),
    Recorded("qwen3_coder", "<function=add>\n<parameter=a>\n12", (("add", '{"a": 12'),)),
)
