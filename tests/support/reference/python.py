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
OPTIONS = ("GenerateOptions", "ChatOptions", "Prompt", "Messages", "ResponseFormat")
FUNCTIONS = ("choices_of",)
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

- A turn of the assistant may have `tool_calls`, as ToolCall or as the OpenAI API has them, and `reasoning`.
- A turn of a tool has the `tool_call_id` of the call that it answers.
- Any turn may have a `name`.

### ResponseFormat

A pydantic model (version 2), a JSON Schema as a dictionary, or `"json_object"`.
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
    told = ALIASES.format(prompt=_annotation(client.Prompt), messages=_annotation(client.Messages))
    parts += ["## Options of a generation\n", _own_options(), _options("ChatOptions"), told]
    kinds = [name for name in client.__all__ if name not in CLIENTS + OPTIONS + FUNCTIONS and not _is_error(name)]
    parts += ["## Results\n", *(_record(name) for name in kinds), *map(_function, FUNCTIONS), _errors()]
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
    return "\n".join([*parts, *_methods(name, kind)])


def _methods(name: str, kind: type[Any]) -> list[str]:
    return [
        f"#### {name}.{method}\n\n{_code(method, function)}\n\n{_text(function)}\n"
        for method, function in vars(kind).items()
        if not method.startswith("_") and inspect.isfunction(function)
    ]


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


def _function(name: str) -> str:
    function = getattr(client, name)
    return f"### {name}\n\n{_code(name, function)}\n\n{_text(function)}\n"


def _own_options() -> str:
    """Those of GenerateOptions; the chat's have a table of their own."""
    return _options("GenerateOptions", frozenset(client.ChatOptions.__annotations__))


def _options(named: str, elsewhere: frozenset[str] = frozenset()) -> str:
    options = getattr(client, named)
    hints = get_type_hints(options, include_extras=True)
    rows = []
    for name, hint in hints.items():
        if name in elsewhere:
            continue
        kind, description = get_args(hint)[:2]
        shown = "ResponseFormat" if kind == client.ResponseFormat | None else _annotation(kind).removesuffix(" | None")
        rows.append((f"`{name}`", f"`{shown}`", one_line(description)))
    first = paragraphs(options.__doc__)[0]
    return f"### {named}\n\n{first}\n\n{table(('option', 'type', 'description'), rows)}"


def _record(name: str) -> str:
    kind: Any = getattr(client, name)
    head = f"### {name}\n\n{_text(kind)}\n"
    comments = comments_of(kind)
    if issubclass(kind, enum.Enum):
        rows = [(f"`{one.name}`", f'`"{one.value}"`', comments.get(one.name, "")) for one in kind]
        return f"{head}\n{table(('member', 'value', 'meaning'), rows)}"
    if "__dataclass_fields__" not in vars(kind):  # a protocol
        methods = [(method, one) for method, one in vars(kind).items() if isinstance(one, classmethod)]
        told = [(f"`{method}`", one_line(one.__doc__)) for method, one in methods]
        return f"{head}\n{table(('class method', 'meaning'), told)}"
    rows = []
    for field in dataclasses.fields(kind):
        rows.append((f"`{field.name}`", f"`{_annotation(field.type)}`", comments[field.name]))
    for attribute, value in vars(kind).items():
        if isinstance(value, property):
            returned = _annotation(inspect.signature(value.fget).return_annotation)  # type: ignore[arg-type]
            rows.append((f"`{attribute}`", f"`{returned}`", one_line(value.__doc__)))
    return "\n".join([head, table(("field", "type", "meaning"), rows), *_methods(name, kind)])


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
