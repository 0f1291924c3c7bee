"""Pieces of Lark grammars, as llguidance reads them (its docs/syntax.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.parsing.formats.base import Literal, ToolSchema

ANY_OBJECT = '{"type": "object"}'


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def alternatives(expressions: Sequence[str]) -> str:
    """One of them."""
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def schema_rules(tools: Sequence[ToolSchema]) -> tuple[list[str], tuple[str, ...]]:
    """For each tool the name of a rule for its arguments, and the rules."""
    names = [f"arguments_{i}" for i in range(len(tools))]
    rules = (f"{name}: {json_rule(tool.schema or ANY_OBJECT)}" for name, tool in zip(names, tools, strict=True))
    return names, tuple(rules)


def json_rule(schema: str) -> str:
    """JSON that fits a schema, which is JSON itself; on one line."""
    return f"%json {json.dumps(json.loads(schema))}"


def json_calls(tools: Sequence[ToolSchema], key: str) -> tuple[str, tuple[str, ...]]:
    """An expression for one call as ``{"name": ..., key: {...}}``, and its rules."""
    arguments, rules = schema_rules(tools)
    calls = []
    for tool, rule in zip(tools, arguments, strict=True):
        head = f'{{"name": {quoted(tool.name)}, "{key}": '
        calls.append(f"{quoted(head)} {rule} {quoted('}')}")
    return alternatives(calls), rules


def tagged_calls(
    tools: Sequence[ToolSchema],
    head: Callable[[str], str],
    field: Callable[[str, str], str],
    value_end: str,
    literal: Literal,
) -> tuple[str, tuple[str, ...]]:
    """An expression for one call whose arguments are tags, in the order of their schema, and its rules.

    head: of a call of this name. field: of an argument and the expression of its value and ``value_end``. Raises
    InvalidRequest for a schema that does not list its properties.
    """
    rules: list[str] = []
    calls = []
    for i, tool in enumerate(tools):
        schema = json.loads(tool.schema or ANY_OBJECT)
        properties = schema.get("properties", {})
        if not isinstance(properties, dict) or any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref")):
            raise InvalidRequest(f"tools[{i}].parameters", "must list its properties for the model's form of calls")
        fields = []
        for j, (key, value) in enumerate(properties.items()):
            rules.append(f"value_{i}_{j}{_value_rule(value, schema, value_end, literal)}")
            required = key in schema.get("required", ())
            fields.append(f"({field(key, f'value_{i}_{j}')}){'' if required else '?'}")
        calls.append(" ".join([head(tool.name), *fields]))
    return alternatives(calls), tuple(rules)


def is_text(schema: Any) -> bool:
    """Whether a schema takes text and nothing else."""
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "string":
        return True
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return bool(values) and all(isinstance(value, str) for value in values)


def _value_rule(schema: Any, root: dict[str, Any], end: str, literal: Literal) -> str:
    """The rest of a rule for a value and what ends it: text as it is, everything else as JSON."""
    if not is_text(schema):
        inner = dict(schema) if isinstance(schema, dict) else {}
        inner |= {word: root[word] for word in ("$defs", "definitions") if word in root}
        return f": %json {json.dumps(inner)} {literal(end)}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return f": {alternatives([quoted(value) for value in values])} {literal(end)}"
    if literal(end) == quoted(end):
        return f"[lazy]: /(.|\\n)*/ {quoted(end)}"
    return f": /(.|\\n)*/ {literal(end)}"
