"""docs/api/python.md, from the docstrings, annotations and comments of ``paceline.client``."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from typing import Any, get_args, get_type_hints

from paceline import client, errors
from tests.support.reference.comments import comments_of
from tests.support.reference.markdown import made_from, one_line, paragraphs, table

CLIENTS = ("Client", "ChunkStream", "AsyncClient", "AsyncChunkStream")
OPTIONS = ("GenerateOptions", "Prompt", "Messages")
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
LINE = 100  # characters of a signature on one line

PAGE = """\
# Python SDK

{made}

`pip install` of Paceline without extras installs the SDK alone. It needs grpcio and protobuf, and neither torch nor
ray.

{example}

Everything on this page is imported from `paceline.client`.
"""

ALIASES = """\
### Prompt

`{prompt}`: a text, token ids, or the messages of a chat.

### Messages

`{messages}`: turns of a chat, each `{{"role": ..., "content": ...}}`.
"""

ERRORS = """\
## Errors

Every method raises `PacelineError` or one of its kinds. gRPC's status and HTTP's are what other clients see. An option
that does not exist or has a wrong type raises `TypeError`, and a value that no request can hold `ValueError`, before
anything is sent.
"""


def python_page() -> str:
    """The page."""
    example = next(block for block in paragraphs(client.__doc__) if block.startswith("```"))
    parts = [PAGE.format(made=made_from("paceline/client/, results.py and errors.py"), example=example)]
    parts += ["## Clients\n", *(_class(name) for name in CLIENTS)]
    prompt, messages = (_annotation(str(alias)) for alias in (client.Prompt, client.Messages))
    parts += ["## Options of a generation\n", _options(), ALIASES.format(prompt=prompt, messages=messages)]
    kinds = [name for name in client.__all__ if name not in CLIENTS + OPTIONS and not _is_error(name)]
    parts += ["## Results\n", *(_record(name) for name in kinds), _errors()]
    return "\n".join(parts)


def _is_error(name: str) -> bool:
    kind = getattr(client, name)
    return isinstance(kind, type) and issubclass(kind, Exception)


def _class(name: str) -> str:
    kind = getattr(client, name)
    parts = [f"### {name}\n", f"{_text(kind)}\n"]
    made = vars(kind).get("__init__")
    if made is not None and made.__doc__:
        parts.append(f"```python\n{_signature(name, made)}\n```\n\n{_text(made)}\n")
    for method, function in vars(kind).items():
        if not method.startswith("_") and inspect.isfunction(function):
            parts.append(f"#### {name}.{method}\n\n{_code(method, function)}\n\n{_text(function)}\n")
    return "\n".join(parts)


def _code(name: str, function: Any) -> str:
    before = "async " if inspect.iscoroutinefunction(function) else ""
    return f"```python\n{before}{_signature(name, function)}\n```"


def _signature(name: str, function: Any) -> str:
    """As a reader would write it: one line, or a line for each parameter."""
    found = inspect.signature(function)
    kept = [one for one in found.parameters.values() if one.name != "self"]
    back = "" if name[0].isupper() else f" -> {_annotation(found.return_annotation)}"
    words: list[str] = []
    for before, one in zip([None, *kept], kept, strict=False):
        if before and before.kind is POSITIONAL and one.kind is not POSITIONAL:
            words.append("/")
        if one.kind is KEYWORD and (before is None or before.kind is not KEYWORD):
            words.append("*")
        words.append(_annotation(one))
    line = f"{name}({', '.join(words)}){back}"
    return line if len(line) <= LINE else f"{name}(\n    " + ",\n    ".join(words) + f",\n){back}"


def _text(documented: Any) -> str:
    return "\n\n".join(paragraphs(documented.__doc__))


def _annotation(text: Any) -> str:
    return re.sub(r"\b(?:collections\.abc|typing|paceline\.\w+)\.|'", "", str(text))


def _options() -> str:
    hints = get_type_hints(client.GenerateOptions, include_extras=True)
    rows = []
    for name, hint in hints.items():
        kind, description = get_args(hint)[:2]
        rows.append((f"`{name}`", f"`{_annotation(kind).removesuffix(' | None')}`", one_line(description)))
    first = paragraphs(client.GenerateOptions.__doc__)[0]
    return f"### GenerateOptions\n\n{first}\n\n{table(('option', 'type', 'description'), rows)}"


def _record(name: str) -> str:
    kind = getattr(client, name)
    head = f"### {name}\n\n{_text(kind)}\n"
    comments = comments_of(kind)
    if issubclass(kind, enum.Enum):
        rows = [(f"`{one.name}`", f'`"{one.value}"`', comments.get(one.name, "")) for one in kind]
        return f"{head}\n{table(('member', 'value', 'meaning'), rows)}"
    rows = []
    for field in dataclasses.fields(kind):
        rows.append((f"`{field.name}`", f"`{_annotation(field.type)}`", comments[field.name]))
    for attribute, value in vars(kind).items():
        if isinstance(value, property):
            returned = _annotation(inspect.signature(value.fget).return_annotation)  # type: ignore[arg-type]
            rows.append((f"`{attribute}`", f"`{returned}`", one_line(value.__doc__)))
    return f"{head}\n{table(('field', 'type', 'meaning'), rows)}"


def _errors() -> str:
    told = {
        match[1]: (match[2] or "")
        for line in (errors.__doc__ or "").splitlines()
        if (match := re.match(r"\W*(\w+)\s+.*?(?:  +([A-Z_]+(?: / HTTP \d+)?))?$", line))
    }
    names = [name for name in client.__all__ if _is_error(name)]
    names.sort(key=lambda name: name != "PacelineError")
    rows = [(f"`{name}`", told.get(name, ""), one_line(getattr(client, name).__doc__)) for name in names]
    return f"{ERRORS}\n{table(('error', 'status', 'meaning'), rows)}"
