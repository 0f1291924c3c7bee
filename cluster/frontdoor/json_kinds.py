"""Kinds of JSON values: how one is read, and what a JSON Schema says of it. Both stand side by side, so that a document
made of the schemas says what the reader takes.

A reader raises InvalidRequest with the path of the value that is wrong, e.g. ``messages[0].role``. In objects a field
that is null counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cluster.frontdoor.json_body import MAX_KEY_CHARS
from paceline.errors import InvalidRequest, quoted

INT64_MIN, UINT64_MAX = -(2**63), 2**64 - 1  # beyond these nothing here has a meaning, and float() may overflow

T = TypeVar("T")
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Kind(Generic[T]):
    """``read(value, name)`` returns what the value stands for, or raises InvalidRequest naming ``name``."""

    read: Callable[[Any, str], T]
    schema: Schema

    def described(self, text: str) -> Kind[T]:
        """The same, with a description for the document."""
        return Kind(self.read, {**self.schema, "description": text})


ANYTHING: Kind[Any] = Kind(lambda value, name: value, {})


def integer(low: int = INT64_MIN, high: int = UINT64_MAX) -> Kind[int]:
    """An integer from ``low`` to ``high``."""

    def read(value: Any, name: str) -> int:
        if type(value) is not int:  # a bool is none
            raise InvalidRequest(name, "must be an integer")
        if not low <= value <= high:
            raise InvalidRequest(name, f"must be between {low} and {high}, got {_shown(value)}")
        return value

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float, *, above: bool = False) -> Kind[float]:
    """A number from ``low`` to ``high``. above: ``low`` itself is too low."""

    def read(value: Any, name: str) -> float:
        if type(value) not in (int, float):
            raise InvalidRequest(name, "must be a number")
        if not low <= value <= high or (above and value == low):
            allowed = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise InvalidRequest(name, f"must be {allowed}, got {_shown(value)}")
        return float(value)

    return Kind(read, {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high})


def text(shortest: int = 0, longest: int | None = None) -> Kind[str]:
    """A string of ``shortest`` to ``longest`` characters; half a surrogate pair is none."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(name, "must be a string")
        if len(value) < shortest or (longest is not None and len(value) > longest):
            most = "" if longest is None else f" and at most {longest}"
            raise InvalidRequest(name, f"must have at least {shortest}{most} characters, got {len(value)}")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise InvalidRequest(name, "is not valid Unicode: a lone surrogate")
        return value

    bounds = {"minLength": shortest} if shortest else {}
    return Kind(read, {"type": "string", **bounds, **({} if longest is None else {"maxLength": longest})})


def flag() -> Kind[bool]:
    """true or false."""

    def read(value: Any, name: str) -> bool:
        if not isinstance(value, bool):
            raise InvalidRequest(name, "must be true or false")
        return value

    return Kind(read, {"type": "boolean"})


def one_of(*choices: str) -> Kind[str]:
    """One of these strings."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(name, "must be a string")
        if value not in choices:
            raise InvalidRequest(name, f"must be one of {', '.join(filter(None, choices))}, got {quoted(value)}")
        return value

    return Kind(read, {"type": "string", "enum": list(choices)})


def only(*same: Any) -> Kind[None]:
    """A field that is not supported: null, or a value that means the same as leaving it out."""

    def read(value: Any, name: str) -> None:
        if value is not None and not any(value == item and type(value) is type(item) for item in same):
            raise InvalidRequest(name, "is not supported")

    return Kind(read, {"enum": [*same, None]})


def list_of(kind: Kind[T], most: int, least: int = 0) -> Kind[tuple[T, ...]]:
    """``least`` to ``most`` items of a kind."""

    def read(value: Any, name: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise InvalidRequest(name, "must be a list")
        if len(value) > most:
            raise InvalidRequest(name, f"at most {most} items, got {len(value)}")
        if len(value) < least:
            raise InvalidRequest(name, "must not be empty" if least == 1 else f"at least {least} items")
        return tuple(kind.read(item, f"{name}[{i}]") for i, item in enumerate(value))

    bounds = {"minItems": least} if least else {}
    return Kind(read, {"type": "array", "items": kind.schema, "maxItems": most, **bounds})


def object_of(kinds: Mapping[str, Kind[Any]], required: tuple[str, ...] = ()) -> Kind[dict[str, Any]]:
    """An object with these fields and no others; the reader returns those that are there. A body's name is empty."""

    def read(value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidRequest(name or "body", "must be an object")
        prefix = f"{name}." if name else ""
        given: dict[str, Any] = {}
        for key, kind in kinds.items():
            if value.get(key) is not None:
                given[key] = kind.read(value[key], f"{prefix}{key}")
            elif key in required:
                raise InvalidRequest(f"{prefix}{key}", "is missing")
        for key, item in value.items():
            if key not in kinds and item is not None:
                raise InvalidRequest(f"{prefix}{key[:MAX_KEY_CHARS] or repr(key)}", "is not a field that is known here")
        return given

    schema = {
        "type": "object",
        "properties": {key: kind.schema if key in required else _or_null(kind.schema) for key, kind in kinds.items()},
        "additionalProperties": {"type": "null"},
    }
    return Kind(read, {**schema, "required": list(required)} if required else schema)


def _or_null(schema: Schema) -> Schema:
    if not schema or None in schema.get("enum", ()):
        return schema
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    return {**about, "anyOf": [{key: value for key, value in schema.items() if key not in about}, {"type": "null"}]}


def _shown(value: float) -> str:
    """A number as an error repeats it; Python refuses to write out integers of thousands of digits."""
    if isinstance(value, int) and not INT64_MIN <= value <= UINT64_MAX:
        return f"a number of {math.ceil(value.bit_length() / 3.33)} digits or so"
    return str(value)
