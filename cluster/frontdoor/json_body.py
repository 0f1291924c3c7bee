"""JSON bodies to objects, strictly: what is no JSON, not finite, or more than can be looked at is refused.

A whole number is an integer however it is written: clients whose language knows one kind of number send ``16.0``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from paceline.errors import InvalidRequest

MAX_KEY_CHARS, MAX_PATH_CHARS = 100, 400  # as far as an error names where it is
MAX_CONTAINERS = 100_000  # lists and objects of a body: millions of them keep Python busy for seconds


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
        if value.is_integer():
            return int(value)
        suspicious |= not math.isfinite(value)  # 1e999
        return value

    if _containers(body) > MAX_CONTAINERS:
        raise InvalidRequest("body", f"has more than {MAX_CONTAINERS} lists and objects")
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
        raise InvalidRequest(next(_not_finite(value))[:MAX_PATH_CHARS], "must be a finite number")
    return value


def _containers(body: bytes) -> int:
    """Lists and objects that ``body`` begins. Brackets within strings are told apart only where it matters."""
    count = body.count(b"[") + body.count(b"{")
    if count <= MAX_CONTAINERS:
        return count
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = b"".join(unescaped.split(b'"')[::2])  # every other piece lies between two texts
    return bare.count(b"[") + bare.count(b"{")


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
