"""What stands beside the fields of plain data classes, as descriptions of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache

from paceline import request, results

FIELD = re.compile(r"^    (\w+)(?:: | = )[^#\n]*(?:#\s*(.*))?$")


def comments_of(kind: type) -> dict[str, str]:
    """The comment on each field's line, by the field's name; empty where there is none."""
    found = (FIELD.match(line) for line in inspect.getsource(kind).splitlines())
    return {match[1]: _sentence(match[2] or "") for match in found if match}


@cache
def field_comments(name: str) -> dict[str, str]:
    """Those of the class of this name in ``paceline.results`` or ``paceline.request``; empty for another."""
    kind = getattr(results, name, None) or getattr(request, name, None)
    return comments_of(kind) if dataclasses.is_dataclass(kind) and isinstance(kind, type) else {}


def _sentence(text: str) -> str:
    text = text.replace("``", "`")
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
