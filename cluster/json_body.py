"""JSON bodies, read strictly: what is wrong is said with the name of its field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from paceline.errors import InvalidRequest

INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # beyond these nothing here has a meaning, and float() may overflow

T = TypeVar("T")
V = TypeVar("V")


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that ``body`` holds. Raises InvalidRequest; a number that is not finite is named by its path."""
    suspicious = False

    def constant(name: str) -> float:
        nonlocal suspicious
        suspicious = True
        return math.nan

    def number(text: str) -> float:
        nonlocal suspicious
        value = float(text)
        suspicious |= not math.isfinite(value)  # 1e999
        return value

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=constant, parse_float=number)
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"is not UTF-8: byte {error.start} is wrong") from None
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", "must be a JSON object")
    if suspicious:
        raise InvalidRequest(next(_not_finite(value)), "must be a finite number")
    return value


def _not_finite(root: Any) -> Iterator[str]:
    """Paths of the numbers that are not finite, e.g. ``logit_bias.5`` or ``prompt[2]``."""
    open_: list[tuple[str, Any]] = [("", root)]
    while open_:
        path, value = open_.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path
        elif isinstance(value, dict):
            open_ += [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            open_ += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    yield "body"  # a repeated key hid it


class Fields:
    """Typed reading of an object. A key that is null counts as absent; every error names path and key."""

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            raise InvalidRequest(path or "body", "must be an object")
        self._values: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        self._path = path

    def name(self, key: str) -> str:
        """``key`` as errors call it."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return key in self._values

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise on the first key that is not among ``known``."""
        for key in self._values:
            if key not in known:
                raise InvalidRequest(self.name(key[:100]), "is not a field that is known here")

    def refuse(self, key: str, *allowed: Any) -> None:
        """Raise when ``key`` is there with a value other than ``allowed``: it would change the result."""
        value = self._values.get(key)
        if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
            raise InvalidRequest(self.name(key), "is not supported")

    def raw(self, key: str) -> Any:
        """The value as it came; None when absent."""
        return self._values.get(key)

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self._read(key, default, as_text)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        return self._read(key, default, as_flag)

    def integer(self, key: str, default: T) -> int | T:
        """An integer that fits 64 bits."""
        return self._read(key, default, as_integer)

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        return self._read(key, default, as_number)

    def items(self, key: str, limit: int | None = None) -> list[Any]:
        """A list of at most ``limit`` items; empty when absent."""
        value = self._values.get(key, [])
        if not isinstance(value, list):
            raise InvalidRequest(self.name(key), "must be a list")
        if limit is not None and len(value) > limit:
            raise InvalidRequest(self.name(key), f"at most {limit} items")
        return value

    def object(self, key: str) -> Fields:
        """A nested object; empty when absent."""
        return Fields(self._values.get(key, {}), self.name(key))

    def _read(self, key: str, default: T, convert: Callable[[Any, str], V]) -> V | T:
        return convert(self._values[key], self.name(key)) if key in self._values else default


def as_text(value: Any, name: str) -> str:
    """A string, or InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a string")
    return value


def as_flag(value: Any, name: str) -> bool:
    """A boolean, or InvalidRequest."""
    if not isinstance(value, bool):
        raise InvalidRequest(name, "must be true or false")
    return value


def as_integer(value: Any, name: str) -> int:
    """An integer of 64 bits, or InvalidRequest."""
    if type(value) is not int:  # a bool is none
        raise InvalidRequest(name, "must be an integer")
    if not INT_MIN <= value <= INT_MAX:
        raise InvalidRequest(name, "does not fit 64 bits")
    return value


def as_number(value: Any, name: str) -> float:
    """A number, or InvalidRequest."""
    if type(value) is int:
        return float(as_integer(value, name))
    if not isinstance(value, float):
        raise InvalidRequest(name, "must be a number")
    return value
