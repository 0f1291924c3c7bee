"""Grammars that would take all time, stack or memory are refused by name, at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.grammar.compile import MAX_CACHED, GrammarCompiler
from paceline.request import Grammar, GrammarKind
from tests.support.grammar_engines import GRAMMAR_VOCAB
from tests.support.tiny_chat import write_chat_tokenizer

QUICK_S = 1.0  # on a machine that runs other tests; alone each takes under 50 ms


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def chained(count: int, make: Callable[[int, dict[str, str]], dict[str, Any]]) -> Grammar:
    """``count`` definitions, each made of the one before it."""
    defs = {"d0": {"type": "string", "pattern": "a.*"}}
    defs |= {f"d{i}": make(i, {"$ref": f"#/$defs/d{i - 1}"}) for i in range(1, count)}
    return schema({"$defs": defs, "$ref": f"#/$defs/d{count - 1}"})


def compact(value: object) -> Grammar:
    return schema(json.dumps(value, separators=(",", ":")))


def named(prefix: str, count: int) -> dict[str, Any]:
    """Properties that are the first item of the list ``prefix``, each by another name of it."""
    return {f"a{i}": {"$ref": prefix + "0" * (i + 1)} for i in range(count)}


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def lark(source: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, source)


BOMBS: dict[str, tuple[Grammar, str]] = {
    "a million enum values": (schema({"enum": list(range(1_000_000))}), "has more than 65536 bytes"),
    "many enum values": (schema({"enum": list(range(9000))}), "an enum of 9000 values"),
    "a million choices": (Grammar(GrammarKind.CHOICE, json.dumps(["x"] * 1_000_000)), "has more than 65536 bytes"),
    "many choices": (Grammar(GrammarKind.CHOICE, json.dumps(["x"] * 3000)), "3000 choices"),
    "a long choice": (Grammar(GrammarKind.CHOICE, json.dumps(["x" * 9000])), "8192 characters"),
    "a long constant": (schema({"const": "x" * 9000}), "8192 characters"),
    "open brackets": (schema("[" * 60_000), "levels deep"),
    "deep schema": (schema('{"items":' * 3000 + "{}" + "}" * 3000), "levels deep"),
    "deep references": (chained(700, lambda i, r: {"type": "array", "items": r}), "levels deep together"),
    "a reference to itself": (schema({"$ref": "#"}), "leads back to itself"),
    "a circle of references": (
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        "leads back to itself",
    ),
    "doubled conjunctions": (chained(20, lambda i, r: {"allOf": [r, r]}), "schemas at once"),
    "a product of branches": (
        schema({"allOf": [{"anyOf": [{"pattern": f"a{i}{j}"} for j in range(4)]} for i in range(9)]}),
        "alternatives",
    ),
    "a large remainder": (schema({"type": "integer", "multipleOf": 999_983}), "multipleOf"),
    "coprime remainders": (schema({"anyOf": [{"multipleOf": p} for p in (97, 89, 83)]}), "multipleOf"),
    "a far reference": (schema({"$ref": "http://127.0.0.1/schema"}), "only references within"),
    "a missing reference": (schema({"$ref": "#/$defs/none"}), "which is not there"),
    "a slow whitespace": (schema({"x-guidance": {"whitespace_pattern": "(a{100}){1000}"}}), "x-guidance"),
    "a million repetitions": (regex("a{1000000}"), "repeats more than"),
    "nested repetitions": (regex("((a{1,100}){1,100}){1,100}"), "repeats more than"),
    "in a pattern": (schema({"type": "string", "pattern": "^((a{100}){100}){100}$"}), "repeats more than"),
    "deep groups": (regex("(" * 5000 + "a" + ")" * 5000), "groups inside one another"),
    "look-ahead": (regex("(?=a)b"), "look-around"),
    "a back-reference": (regex(r"(a)\1"), "backreferences"),
    "an open group": (regex("(a"), "unclosed group"),
    "patterns of properties": (
        schema({"patternProperties": {"^((a{100}){100}){100}$": {"pattern": "a"}}}),
        "repeats more than",
    ),
    "many classes of letters": (regex(r"(\p{L}{1,50}\p{N}{1,50}){1,200}"), "repeats more than"),
    "many names of one schema": (
        compact({"d": [{"allOf": [{"enum": [1] * 2000}] * 9}], "properties": named("#/d/", 170)}),
        "levels deep together",
    ),
    "a text without an end": (lark('start: "' + r"\"" * 15_000), "begins a text or a regular expression"),
    "an expression without an end": (lark("start: /" + r"\/" * 15_000), "begins a text or a regular expression"),
    "rules that begin with themselves": (
        lark('start: start start | start "a" |' + " start |" * 99 + '"b"'),
        "lead back",
    ),
    "an operator behind an expression of two lines": (lark('start: A\nA: /x\n"/ & /y./ | "z"'), "& or ~"),
    "an operator behind a comment": (lark("start: A # /\nA: /x/ & /y./ // /"), "& or ~"),
    "an operator behind a special token": (lark("start: A | </s>\nA: /x/ & /y./"), "& or ~"),
    "intersections": (lark("start: A\nA: /(.*a.{30})/ & ~/(.*c.{28})/"), "& or ~"),
    "in a Lark grammar": (lark("start: /((a{100}){100}){100}/"), "repeats more than"),
    "a schema in a Lark grammar": (lark('start: %json {"enum": [' + "1," * 3000 + "1]}"), "an enum of 3001 values"),
    "doubling terminals": (
        lark("start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(30)) + '\nT30: "a"'),
        "too big",
    ),
    "many ways back": (lark("start: s\ns: " + " | ".join(["s s"] * 60) + ' | "x"'), "lead back to themselves"),
    "many rules back": (
        lark("start: t0\n" + "".join(f"t{i}: t{(i + 1) % 60} t{(i + 7) % 60}\n" for i in range(60))),
        "lead back to themselves",
    ),
    "ways back on a line of their own": (
        lark("start: s\ns\n: " + "\n| ".join(["s s"] * 60) + '\n| "x"'),
        "lead back to themselves",
    ),
    "deep brackets": (lark("start: " + "(" * 2000 + '"a"' + ")" * 2000), "too deeply nested"),
    "deep GBNF": (lark("root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
    "nothing but itself": (lark("start: start"), "cannot be compiled"),
    "no JSON": (schema("{"), "is not JSON"),
    "beyond a float": (schema('{"type": "number", "maximum": 1e999}'), "cannot be read"),
    "not a number": (schema('{"type": "number", "minimum": NaN}'), "is not JSON: NaN"),
    "half a character in a schema": (schema('{"const": "\\ud800"}'), "cannot be read"),
    "half a character in a choice": (Grammar(GrammarKind.CHOICE, '["\\ud800"]'), "cannot be read"),
    "no schema": (schema("[]"), "must be a JSON Schema"),
    "no list": (Grammar(GrammarKind.CHOICE, '"a"'), "must be a JSON list"),
    "lone surrogates": (regex("\ud800"), "not valid Unicode"),
    "an unknown keyword": (schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    made = GrammarCompiler(write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer")), GRAMMAR_VOCAB)
    made.compile(Grammar(GrammarKind.JSON_OBJECT))
    return made


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_name_and_at_once(compiler: GrammarCompiler, name: str) -> None:
    grammar, why = BOMBS[name]
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(grammar)
    assert time.thread_time() - began < QUICK_S
    assert refused.value.field == "grammar"
    assert why in refused.value.message
    assert len(str(refused.value)) < 500


WIDE: dict[str, Grammar] = {
    "a deep schema": schema('{"items":' * 60 + "{}" + "}" * 60),
    "deep definitions": chained(100, lambda i, r: {"type": "object", "properties": {"a": r, "b": r}}),
    "a list of itself": schema({"type": "array", "items": {"$ref": "#"}}),
    "a tree": schema(
        {"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    ),
    "a reference in data": schema({"enum": [{"$ref": "#/nowhere"}]}),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}),
    "money": schema({"type": "number", "multipleOf": 0.01, "minimum": 0}),
    "a date": regex(r"\d{4}-\d{2}-\d{2}"),
    "a host name": regex(r"[a-z]{1,63}(\.[a-z]{1,63}){1,8}"),
    "a class with a bracket": regex(r"[](){2]{3}[^]]\{9999999\}"),
    "a chain of rules": lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(900)) + '\nr900: "a"'),
    "a language": lark(
        "start: e\n" + "\n".join(f'e{i}: e{i + 1} | e{i + 1} "+" e{i + 1} | "[a: b]"' for i in range(300)) + "\n"
        'e: e0 | "(" e ")"\ne300: /[a-z]+/ | "(" e300 ")"'
    ),
    "an expression of two lines": lark('start: /a\n"/ "b" # it\'s "c\n'),
    "comments": lark('// a & b\nstart: "a & ~b" /x{3}/ // /a{999999}/\n'),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_is_merely_large_is_taken(compiler: GrammarCompiler, name: str) -> None:
    assert compiler.compile(WIDE[name]).matcher().compute_bitmask()


def test_the_cache_is_bounded_and_keeps_refusals(compiler: GrammarCompiler) -> None:
    for i in range(MAX_CACHED + 20):
        compiler.compile(regex(f"a{i}"))
    assert len(compiler._kept) == MAX_CACHED
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            compiler.compile(regex("(a"))
    large = [regex("a" * 9000 + str(i)) for i in range(60)]
    for one in large:
        compiler.compile(one)
    assert sum(size for size, _ in compiler._kept.values()) <= 256 * 1024


async def test_the_event_loop_runs_on_while_a_grammar_compiles(compiler: GrammarCompiler) -> None:
    """A stream beside a grammar that takes long: its longest wait is a fraction of the compilation."""
    slow = schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}})
    began = time.monotonic()
    work = asyncio.create_task(compiler.compiled(slow))
    longest, last = 0.0, began
    while not work.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    took = time.monotonic() - began
    assert longest < max(0.05, took / 3)
    again = time.monotonic()
    await compiler.compiled(slow)
    assert time.monotonic() - again < took / 3
    await work


def test_a_model_without_tokenizer_or_end_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        GrammarCompiler(None, 10).compile(Grammar(GrammarKind.JSON_OBJECT))
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        GrammarCompiler(tmp_path, 10).compile(Grammar(GrammarKind.JSON_OBJECT))
    folder = write_chat_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        GrammarCompiler(folder, GRAMMAR_VOCAB).compile(Grammar(GrammarKind.JSON_OBJECT))
