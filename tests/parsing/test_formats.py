"""Answers of every format: what they mean, and that it never shows how their text was cut into pieces."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.option_values import ReasoningParser, ToolCallParser
from paceline.parsing.answer import AnswerFormat, AnswerParts, call_ids
from paceline.parsing.json_scan import JsonScanner
from paceline.parsing.parser import AnswerParser
from paceline.parsing.registry import REASONING_FORMATS, TOOL_FORMATS
from paceline.results import joined
from tests.support.recorded_answers import MALFORMED, TOOLS, WELL_FORMED, Recorded, groupings, read
from tests.support.tiny_tokenizers import QUICK

GROUPINGS = 200
ALL = WELL_FORMED + MALFORMED
PIECES = sorted(
    {m for form in TOOL_FORMATS.values() for m in form.markers}
    | {"<think>", "</think>", '{"name": "add", ', '"arguments": ', '"parameters": ', '{"a": 1}', "}", "[", "]", '"'}
    | {
        " ",
        "\n",
        "a",
        "<",
        "add",
        "\\",
        "function",
        "```json\n",
        "\n```",
        ",",
        ";",
        "é",
        "<function=add>",
        "</function>",
    }
)


def expected(case: Recorded) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
    calls = tuple((f"id-{i}", name, arguments) for i, (name, arguments) in enumerate(case.calls))
    return case.said, case.reasoning, calls


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.tool_calls} {case.text[:40]!r}")
def test_parts_and_groupings(case: Recorded) -> None:
    """Whole, in two pieces wherever they are cut, and in pieces of any size."""
    assert read(case.form, [case.text]) == expected(case)
    for at in range(1, len(case.text)):
        assert read(case.form, [case.text[:at], case.text[at:]]) == expected(case), at
    for pieces in groupings(case.text, GROUPINGS, seed=len(case.text)):
        assert read(case.form, pieces) == expected(case), pieces


@pytest.mark.parametrize("case", WELL_FORMED, ids=lambda case: f"{case.tool_calls} {case.text[:40]!r}")
def test_arguments_are_json_objects(case: Recorded) -> None:
    for _, arguments in case.calls:
        assert isinstance(json.loads(arguments), dict)


@QUICK
@given(
    name=st.sampled_from(["", *TOOL_FORMATS]),
    reasoning=st.sampled_from(["", *REASONING_FORMATS]),
    is_open=st.booleans(),
    one=st.booleans(),
    pieces=st.lists(st.sampled_from(PIECES), max_size=30),
    seed=st.integers(0, 99),
)
def test_any_text(name: str, reasoning: str, is_open: bool, one: bool, pieces: list[str], seed: int) -> None:
    """No exception, and no grouping shows, whatever a model writes."""
    form, text = AnswerFormat(name, reasoning, is_open, TOOLS, one), "".join(pieces)
    whole = read(form, [text])
    assert all(read(form, cut) == whole for cut in groupings(text, 5, seed))


@QUICK
@given(name=st.sampled_from(list(TOOL_FORMATS)), text=st.text(st.sampled_from('ab<>[]{}|"\\ \n_'), max_size=60))
def test_text_without_calls_comes_out_whole(name: str, text: str) -> None:
    assert read(AnswerFormat(name, "", False, TOOLS), [text]) == (text, "", ())


def test_arguments_stream() -> None:
    parser = AnswerParser(AnswerFormat("hermes", tools=TOOLS), str)
    assert parser.push('<tool_call>{"name": "add"') == AnswerParts()
    first = parser.push(', "arguments": {"a"')
    assert [(part.index, part.id, part.name, part.arguments) for part in first.tool_calls] == [(0, "0", "add", '{"a"')]
    (second,) = parser.push(": 1").tool_calls
    assert (second.index, second.id, second.name, second.arguments) == (0, "", "", ": 1")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_one_call_ends_the_answer(name: str) -> None:
    case = next(case for case in WELL_FORMED if case.tool_calls == name and len(case.calls) == 2)
    parser, parts = AnswerParser(AnswerFormat(name, "", False, TOOLS, True), str), AnswerParts()
    for character in case.text:
        assert not parser.over
        parts += parser.push(character)
        if parser.over:
            break
    assert parser.over
    assert parser.push(case.text) + parser.finish() == AnswerParts()
    assert [(call.name, call.arguments) for call in joined(parts.tool_calls)] == list(case.calls[:1])


@QUICK
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    indent=st.sampled_from([None, 1]),
    cut=st.integers(0, 200),
)
def test_json_scanner_agrees_with_json(value: object, indent: int | None, cut: int) -> None:
    text = json.dumps({"": value}, indent=indent)
    scanner = JsonScanner()
    assert all(scanner.feed(character) for character in text)
    assert scanner.done
    shorter = JsonScanner()
    assert all(shorter.feed(character) for character in text[: min(cut, len(text) - 1)])
    assert not shorter.done


@pytest.mark.parametrize(
    "text", ['{"a" 1', '{"a": 01}', '{"a": .5,', '{"a": nul}', '{"a": 1,}', "{,", '{"a": "\\u00g', "[1 2"]
)
def test_json_scanner_refuses(text: str) -> None:
    scanner = JsonScanner()
    assert not all(scanner.feed(character) for character in text)


def test_ids_depend_on_prompt_seed_and_index() -> None:
    ids = {call_ids(prompt, seed, None)(i) for prompt in ((1, 2), (1, 3)) for seed in (0, 1) for i in (0, 1)}
    assert len(ids) == 8
    assert call_ids((1, 2), 0, None)(0) == call_ids([1, 2], 0, None)(0)
    assert len(call_ids((1, 2), 0, TOOL_FORMATS["mistral"].most_id_chars)(0)) == 9


def test_options_name_the_formats() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_FORMATS}
