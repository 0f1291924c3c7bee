"""What a grammar may ask for, checked before it is compiled: each bound keeps one known way to run out of time, stack
or memory from a compiler that strangers write programs for.

All functions raise ``InvalidRequest`` for the field ``grammar``, in time linear in the source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from paceline.errors import InvalidRequest, quoted
from paceline.grammar.recursion import MAX_RECURSIVE, recursive_references

FIELD = "grammar"
MAX_SOURCE_BYTES = 64 * 1024
MAX_CHOICES = 2000
MAX_LITERAL = 8192  # characters of one text that must stand as it is: each mask looks to the end of what is forced
MAX_ENUM = 2000  # values of one enum
MAX_SCHEMA_NODES = 20_000  # JSON values in a schema
MAX_SCHEMA_DEPTH = 64  # JSON levels of a schema
MAX_REFERENCE_DEPTH = 500  # JSON levels of a schema and of everything it refers to, one below the other
MAX_ALTERNATIVES = 1000  # combinations that the branches under an allOf may make
MAX_CONJUNCTS = 64  # schemas that must hold at once, references followed
MAX_MULTIPLE = 5000  # least common multiple of a schema's multipleOf, decimal points left out
MAX_REPEATED = 10_000  # characters that a regular expression may spell out, repetitions written out
MAX_SEPARATOR = 16  # characters between two JSON values
MAX_GROUPS = 100  # groups of a regular expression inside one another

DATA = ("enum", "const", "default", "examples")  # keywords whose values are data, not schemas

_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
# The pieces of a Lark grammar in which a quote or a slash means something else than outside, as llguidance cuts them:
# a regular expression may go on over lines, a text may not. What begins and does not end is a piece by itself.
_LARK_PIECE = re.compile(
    r'(?P<comment>(?://|#)[^\n]*)|(?P<token><[^<>\s]+>)|(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|/(?P<regex>(?:[^/\\]|\\.)+)/[a-z]*|(?P<open>[\"/])"
    r"|%json\s*(?=\{)(?P<schema>)|(?P<command>%(?!import\b|ignore\b)\w+)|(?P<operator>&|~(?!\s*\d))",
)


def refuse(why: str) -> NoReturn:
    """Raise what every bound raises."""
    raise InvalidRequest(FIELD, why)


def check_source(source: str) -> None:
    """The size of a source, and that it is Unicode."""
    if len(source) > MAX_SOURCE_BYTES or len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        refuse(f"has more than {MAX_SOURCE_BYTES} bytes")
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(f"is not valid Unicode at character {error.start}")


def parsed(source: str) -> Any:
    """JSON as Python values."""
    try:
        return json.loads(source, parse_constant=_no_number)
    except RecursionError:
        refuse(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    except ValueError as error:
        refuse(f"is not JSON: {error}")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_choices(value: object) -> list[str]:
    """The texts of a choice: a list of distinct, non-empty texts."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        refuse("must be a JSON list of non-empty texts")
    if max(map(len, value)) > MAX_LITERAL:
        refuse(f"has a choice of more than {MAX_LITERAL} characters")
    if len(value) > MAX_CHOICES:
        refuse(f"has {len(value)} choices, at most {MAX_CHOICES} are taken")
    return list(dict.fromkeys(value))


def check_schema(schema: object) -> None:
    """A JSON Schema, as Python values."""
    if not isinstance(schema, dict):
        refuse("must be a JSON Schema, which is a JSON object")
    _SchemaCheck(schema).run()


def check_regex(pattern: str) -> None:
    """How much a regular expression spells out when every counted repetition is written out, and its nesting."""
    sizes, last = [0.0], 0.0  # of the open groups; of the item that a repetition would repeat
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        found = _REPEAT.match(pattern, at) if letter == "{" else None
        if letter == "\\":
            at, last = at + 2, 1.0
            sizes[-1] += last
        elif letter == "[":
            at, last = _class_end(pattern, at), 1.0
            sizes[-1] += last
        elif letter == "(":
            sizes.append(0.0)
            at += 1
            if len(sizes) > MAX_GROUPS:
                refuse(f"has more than {MAX_GROUPS} groups inside one another")
        elif letter == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
            at += 1
        elif found is not None:
            times = max([int(number[:9]) for number in found.groups() if number], default=1)
            sizes[-1] += last * (times - 1)
            last *= times
            at = found.end()
        else:
            at, last = at + 1, 0.0 if letter in "*+?|^$" else 1.0
            sizes[-1] += last
        if sizes[-1] > MAX_REPEATED:
            refuse(f"repeats more than {MAX_REPEATED} times in a regular expression, repetitions written out")


def _class_end(pattern: str, start: int) -> int:
    """Where the character class that begins at ``start`` ends."""
    at = start + 1 + pattern.startswith("^", start + 1)
    at += pattern.startswith("]", at)
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def check_lark(source: str) -> None:
    """Regular expressions and schemas inside a Lark grammar, and that it has no operator whose cost has no bound."""
    at, rules = 0, list[str]()  # rules: without what is looked at here
    while (found := _LARK_PIECE.search(source, at)) is not None:
        rules.append(source[at : found.start()])
        at = found.end()
        if found["regex"] is not None:
            check_regex(found["regex"])
        elif found["open"] is not None:
            refuse(f"has a {found['open']} that begins a text or a regular expression without an end")
        elif found["operator"] is not None:
            refuse("uses & or ~ between terminals, which is not supported: the cost has no bound")
        elif found["command"] is not None:
            refuse(f"uses {found['command']}, which is not supported; %json, %import and %ignore are")
        elif found["schema"] is not None:
            at = _check_inline_schema(source, at)
    if recursive_references(" ".join([*rules, source[at:]])) > MAX_RECURSIVE:
        refuse(f"has more than {MAX_RECURSIVE} references between rules that lead back to themselves")


def _check_inline_schema(source: str, at: int) -> int:
    try:
        schema, end = json.JSONDecoder().raw_decode(source, at)
    except (ValueError, RecursionError) as error:
        refuse(f"has a %json that is not JSON: {error}")
    check_schema(schema)
    return end


class _SchemaCheck:
    """One pass over a schema, then one over what its references make of it."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._nodes = 0
        self._multiple = 1
        self._targets: dict[str, Any] = {}
        self._heights: dict[int, int] = {}  # of lists and objects: JSON levels
        self._weights: dict[int, tuple[float, float]] = {}

    def run(self) -> None:
        """Raise for the first bound that is broken."""
        depth = self._look(self._schema, 1)
        depth += sum(self._heights.get(id(target), 1) for target in self._targets.values())
        if depth > MAX_REFERENCE_DEPTH:
            refuse(f"refers to schemas that are nested more than {MAX_REFERENCE_DEPTH} levels deep together")
        self._weigh(self._schema, ())

    def _look(self, value: object, depth: int, *, data: bool = False) -> int:
        """Count values and look at keywords; returns the deepest level. data: it is no schema."""
        self._nodes += 1
        if self._nodes > MAX_SCHEMA_NODES:
            refuse(f"has more than {MAX_SCHEMA_NODES} values")
        if depth > MAX_SCHEMA_DEPTH:
            refuse(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if data and isinstance(value, str) and len(value) > MAX_LITERAL:
            refuse(f"has an enum or const of more than {MAX_LITERAL} characters")
        if isinstance(value, dict) and not data:
            self._keywords(value)
        below = [(item, data) for item in value] if isinstance(value, list) else []
        if isinstance(value, dict):
            below = [(item, data or key in DATA) for key, item in value.items()]
        deepest = max((self._look(item, depth + 1, data=its) for item, its in below), default=depth)
        if isinstance(value, dict | list):
            self._heights[id(value)] = deepest - depth + 1
        return deepest

    def _keywords(self, value: Mapping[str, Any]) -> None:
        if isinstance(pattern := value.get("pattern"), str):
            check_regex(pattern)
        if isinstance(patterns := value.get("patternProperties"), dict):
            for pattern in patterns:
                check_regex(pattern)
        if (style := value.get("x-guidance")) is not None:
            _check_style(style)
        if isinstance(enum := value.get("enum"), list) and len(enum) > MAX_ENUM:
            refuse(f"has an enum of {len(enum)} values, at most {MAX_ENUM} are taken")
        if isinstance(reference := value.get("$ref"), str):
            self._targets[reference] = self._target(reference)
        if (multiple := value.get("multipleOf")) is not None:
            self._multiple = math.lcm(self._multiple, _coefficient(multiple))
            if self._multiple > MAX_MULTIPLE:
                refuse(f"has a multipleOf with more than {MAX_MULTIPLE} remainders")

    def _target(self, reference: str) -> object:
        """What a reference within the schema stands for (RFC 6901)."""
        if not reference.startswith("#"):
            refuse(f"refers to {quoted(reference)}: only references within the schema are taken")
        value: Any = self._schema
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                refuse(f"refers to {quoted(reference)}, which is not there")
        return value

    def _weigh(self, value: object, above: tuple[int, ...]) -> tuple[float, float]:
        """How many combinations of branches, and how many schemas at once, the compiler makes of ``value`` itself.

        A schema that holds itself at the same place, by references alone, holds nothing: it is refused.
        """
        if not isinstance(value, dict):
            for item in _items(value):
                self._weigh(item, ())
            return 1.0, 1.0
        if id(value) in above:
            refuse("has a reference that leads back to itself")
        if id(value) in self._weights:
            return self._weights[id(value)]
        here = (*above, id(value))
        branches, at_once = 1.0, 1.0
        if isinstance(reference := value.get("$ref"), str):
            branches, at_once = self._weigh(self._targets[reference], here)
        for item in _list(value.get("allOf")):
            some, more = self._weigh(item, here)
            branches, at_once = branches * some, at_once + more
        for word in ("anyOf", "oneOf"):
            parts = [self._weigh(item, here) for item in _list(value.get(word))]
            if parts:
                branches, at_once = branches * sum(b for b, _ in parts), at_once + max(n for _, n in parts)
        if branches > MAX_ALTERNATIVES:
            refuse(f"combines more than {MAX_ALTERNATIVES} alternatives")
        if at_once > MAX_CONJUNCTS:
            refuse(f"asks for more than {MAX_CONJUNCTS} schemas at once")
        self._weights[id(value)] = branches, at_once
        for key, item in value.items():
            if key not in ("allOf", "anyOf", "oneOf", *DATA):
                self._weigh(item, ())
        return branches, at_once


def _check_style(style: object) -> None:
    """How JSON is written: the library's options that can do no harm."""
    if not isinstance(style, dict):
        refuse("has an x-guidance that is no object")
    for name, value in style.items():
        flag = name == "whitespace_flexible" and isinstance(value, bool)
        text = name in ("item_separator", "key_separator") and isinstance(value, str) and len(value) <= MAX_SEPARATOR
        if not flag and not text:
            refuse(f"has {quoted(str(name))} in x-guidance, which takes whitespace_flexible and short separators")


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _coefficient(multiple: object) -> int:
    """The digits of a number without its decimal point."""
    try:
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
    except InvalidOperation:
        refuse("has a multipleOf that is no number")
    number = int("".join(map(str, digits)))
    exponent = Decimal(str(multiple)).normalize().as_tuple().exponent
    if not isinstance(exponent, int) or number == 0:
        refuse("has a multipleOf that is no number above 0")
    zeros: int = 10 ** min(max(exponent, 0), 9)
    return number * zeros
