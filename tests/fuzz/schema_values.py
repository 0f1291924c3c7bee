"""Values that a JSON Schema allows, and values that it does not: pure functions of a random generator.

The words of JSON Schema that the document uses are known here; another one is an error, not silently passed over.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

KNOWN = {
    *("type", "enum", "const", "anyOf", "oneOf", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength"),
    *(
        "items",
        "minItems",
        "maxItems",
        "properties",
        "required",
        "additionalProperties",
        "propertyNames",
        "maxProperties",
    ),
    *("title", "description", "default", "pattern"),
}
WRONG_TYPES: tuple[Any, ...] = ({}, [], "", "x", 0, 1.5, True, [[]], {"a": 1}, [None], "1", -1, 2**70, -(2**63) - 1)
# What an object with any properties stands for: a JSON Schema.
JSON_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["x", 1]},
)
MOST_ITEMS = 4  # of what is drawn; limits are for what is wrong
LETTERS = 'ab é\u2028\0"\\\U0001f600{}[]<>%'

Schema = Mapping[str, Any]


def inlined(schema: Any, components: Mapping[str, Any]) -> Any:
    """The schema with the components that it refers to in their places. components: those of an OpenAPI document."""
    if isinstance(schema, list):
        return [inlined(item, components) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        about = {key: value for key, value in schema.items() if key != "$ref"}
        return inlined(components["schemas"][schema["$ref"].rpartition("/")[2]], components) | about
    return {key: inlined(value, components) for key, value in schema.items()}


def allowed(rng: random.Random, schema: Schema) -> Any:
    """A value of the schema."""
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if branches := _branches(schema):
        return allowed(rng, rng.choice(branches))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "object" if schema.get("additionalProperties") is True:
            return rng.choice(JSON_SCHEMAS)
        case "object":
            return _object(rng, schema)
        case "array":
            count = rng.randint(schema.get("minItems", 0), min(schema.get("maxItems", MOST_ITEMS), MOST_ITEMS))
            return [allowed(rng, schema["items"]) for _ in range(count)]
        case "string":
            return _text(rng, schema.get("minLength", 0), schema.get("maxLength", 12), schema.get("pattern", ""))
        case "integer":
            low, high = int(schema["minimum"]), int(schema["maximum"])
            return rng.choice((low, high, rng.randint(low, high), max(low, min(high, rng.randint(0, 300)))))
        case "number":
            return _number(rng, schema)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return rng.choice(WRONG_TYPES)  # anything goes


def _branches(schema: Schema) -> list[Schema]:
    """The branches of a union, which exclude each other where the schema says ``oneOf``."""
    found: list[Schema] = schema.get("anyOf") or schema.get("oneOf") or []
    return found


def _object(rng: random.Random, schema: Schema) -> dict[str, Any]:
    if "propertyNames" in schema:
        count = rng.randint(0, MOST_ITEMS)
        return {str(rng.randint(0, 257)): allowed(rng, schema["additionalProperties"]) for _ in range(count)}
    if "properties" not in schema:  # any object, or one of values of a kind
        values = schema.get("additionalProperties")
        inner = values if isinstance(values, Mapping) else {}
        return {_text(rng, 1, 8): allowed(rng, inner) for _ in range(rng.randint(0, MOST_ITEMS))}
    optional = [name for name in schema["properties"] if name not in schema.get("required", ())]
    names = [*schema.get("required", ()), *rng.sample(optional, min(len(optional), rng.choice((0, 1, 2, 3, 8))))]
    return {name: allowed(rng, schema["properties"][name]) for name in names}


def _text(rng: random.Random, shortest: int, longest: int, pattern: str = "") -> str:
    """pattern: of texts of any length whose characters are of one kind."""
    count = rng.choice((shortest, longest, rng.randint(shortest, max(shortest, min(longest, 8)))))
    letters = [letter for letter in LETTERS if re.search(pattern, letter)]
    return "".join(rng.choice(letters) for _ in range(count))


def _number(rng: random.Random, schema: Schema) -> float:
    high = schema["maximum"]
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    least = 5e-324 if "exclusiveMinimum" in schema else low
    value: float = rng.choice((least, high, rng.uniform(low, high) or least, (low + high) / 2))
    return value


def wrong(rng: random.Random, schema: Schema) -> Any:
    """A value of the schema, but for one thing somewhere within it. Now and then that is still allowed."""
    if branches := _branches(schema):
        return wrong(rng, rng.choice(branches))
    if rng.random() < 0.3 or "type" not in schema:
        return rng.choice(WRONG_TYPES)
    match schema["type"]:
        case "object" if "properties" in schema:
            return _wrong_object(rng, schema)
        case "object" if schema.get("additionalProperties") is True:
            return rng.choice(WRONG_TYPES)
        case "object":
            if not isinstance(schema.get("additionalProperties"), Mapping):
                return rng.choice(WRONG_TYPES)
            key = rng.choice(("1", "-1", "x", "", "9" * 30, "²", "99999"))
            return {key: wrong(rng, schema["additionalProperties"])}
        case "array":
            return _wrong_list(rng, schema)
        case "string":
            longest = schema.get("maxLength", 64)
            return rng.choice(("", "x" * (longest + 1), "\ud800", "x" * 100_000, "no such", "\udfff" * 3))
        case "integer":
            return rng.choice((schema["minimum"] - 1, schema["maximum"] + 1, 1.5, 2.0, -0.0, 10**300, "1", True))
        case "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            return rng.choice((least - 1e-6, schema["maximum"] * 2 + 1, 1e308, -1e308, 10**400, "1.0", False))
    return rng.choice(WRONG_TYPES)


def _wrong_object(rng: random.Random, schema: Schema) -> Any:
    value = _object(rng, schema)
    name = rng.choice(list(schema["properties"]))
    match rng.randrange(6):
        case 0:
            value[rng.choice(("nonsense", "", "\ud800", "N" * 5000, "__proto__", name.upper()))] = 1
        case 1 if schema.get("required"):
            value.pop(rng.choice(schema["required"]), None)
        case _:
            value[name] = wrong(rng, schema["properties"][name])
    return value


def _wrong_list(rng: random.Random, schema: Schema) -> Any:
    items = allowed(rng, schema)
    most = schema.get("maxItems", 2000)
    match rng.randrange(3):
        case 0 if most < 256 or (most < 10_000 and rng.random() < 0.1):  # thousands of items take seconds to check
            return [allowed(rng, schema["items"])] * (most + 1)
        case 1:
            return items[: schema.get("minItems", 0) - 1] if schema.get("minItems") else [items]
    return [*items, wrong(rng, schema["items"])]
