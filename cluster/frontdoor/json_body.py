"""JSON bodies to objects, strictly: what is no JSON, not finite, or more than can be looked at is refused.

A whole number is an integer however it is written: clients whose language knows one kind of number send ``16.0``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest

MAX_KEY_CHARS, MAX_PATH_CHARS = 100, 400  # as far as an error names where it is
# Python reads a body in one go, and holds up every other stream meanwhile. So each of these is bounded in a body.
MAX_CONTAINERS = 100_000  # lists and objects
MAX_TEXTS = 120_000  # keys and texts; a chat of 2,048 turns with a call each has 27,000
MAX_COMMAS = 600_000  # 128 prompts of 4,096 token ids have 524,000
MAX_FRACTIONS = 100_000  # numbers with a point or an exponent


class _Bound(NamedTuple):
    """How often some characters may stand outside of texts."""

    marks: tuple[bytes, ...]
    most: int
    what: str


_BOUNDS = (_Bound((b"[", b"{"), MAX_CONTAINERS, "lists and objects"), _Bound((b",",), MAX_COMMAS, "values"))


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that ``body`` holds. Raises InvalidRequest; a number that is not finite is named by its path."""
    suspicious, fractions = False, 0

    def constant(name: str) -> float:
        nonlocal suspicious
        suspicious = True
        return math.nan

    def number(text: str) -> float:
        nonlocal suspicious, fractions
        fractions += 1
        if fractions > MAX_FRACTIONS:
            raise InvalidRequest("body", f"has more than {MAX_FRACTIONS} numbers with a fraction or an exponent")
        value = float(text)
        if value.is_integer():
            return int(value)
        suspicious |= not math.isfinite(value)  # 1e999
        return value

    _check_size(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=constant, parse_float=number)
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"is not UTF-8: byte {error.start} is wrong") from None
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise InvalidRequest("body", f"has a whole number of more than {most} digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", "must be a JSON object")
    if suspicious:
        raise InvalidRequest(next(_not_finite(value))[:MAX_PATH_CHARS], "must be a finite number")
    return value


def _check_size(body: bytes) -> None:
    """Counted before anything is read. What lies within texts is told apart only where it matters."""
    over = [bound for bound in _BOUNDS if _count(body, bound.marks) > bound.most]
    many_texts = body.count(b'"') / 2 > MAX_TEXTS
    if not over and not many_texts:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if many_texts and unescaped.count(b'"') / 2 > MAX_TEXTS:
        raise InvalidRequest("body", f"has more than {MAX_TEXTS} keys and texts")
    bare = b"".join(unescaped.split(b'"')[::2]) if over else b""  # every other piece lies between two texts
    for bound in over:
        if _count(bare, bound.marks) > bound.most:
            raise InvalidRequest("body", f"has more than {bound.most} {bound.what}")


def _count(body: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(map(body.count, marks))


def _not_finite(root: dict[str, Any]) -> Iterator[str]:
    """Paths of the numbers that are not finite, e.g. ``logit_bias.5`` or ``prompt[2]``."""
    open_: list[tuple[str, Any]] = [("", root)]
    while open_:
        path, value = open_.pop()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, float) and not math.isfinite(item):
                yield within(path, key)
            elif isinstance(item, dict | list):
                open_.append((within(path, key), item))
    yield "body"  # a repeated key hid it


def within(path: str, key: str | int) -> str:
    """The path of ``key`` within the object or list at ``path``; an empty path is the body itself."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    name = key[:MAX_KEY_CHARS] or repr(key)
    return f"{path}.{name}" if path else name
