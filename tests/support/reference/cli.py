"""docs/api/cli.md, from the commands' own help."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

from cluster.commands.cli import app
from cluster.commands.options import ServeHelp
from tests.support.reference.markdown import bounds, made_from, one_line, table

NAMES = {str: "text", int: "whole number", float: "number", bool: "", Path: "path"}
PAGE = """\
# Command line

{made}

`paceline COMMAND --help` shows the same as this page. `paceline --help` lists the commands. A command ends with status
0 when it did what was asked, 1 when that failed, and 2 when an option is wrong.

{list}
"""


def cli_page() -> str:
    """The page."""
    commands = sorted(_leaves(typer.main.get_command(app), "paceline"))
    made = made_from("the functions of cluster/commands/ and benchmarks/command.py")
    rows = [(f"[`{name}`](#{name.replace(' ', '-')})", one_line(command.help)) for name, command in commands]
    parts = [PAGE.format(made=made, list=table(("command", "what it does"), rows).rstrip())]
    return "\n".join([*parts, *(_section(name, command) for name, command in commands)])


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that runs something, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, one in inner.items():
        yield from _leaves(one, f"{name} {word}")


def _section(name: str, command: Any) -> str:
    shown = [one for one in command.params if not one.hidden and "--help" not in one.opts]
    arguments = [one for one in shown if not one.opts[0].startswith("-")]
    options = [one for one in shown if one.opts[0].startswith("-")]
    usage = " ".join([name, *(one.name.upper() for one in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## {name}\n", f"{one_line(command.help)}\n", f"```\n{usage}\n```\n"]
    if arguments:
        rows = [(f"`{one.name.upper()}`", _values(one), one_line(one.help)) for one in arguments]
        parts.append(table(("argument", "values", "description"), rows))
    if options:
        parts.append(table(("option", "default", "values", "description"), map(_option_row, options)))
    if isinstance(command, ServeHelp):
        parts.append("It takes every option of [Configuration](../configuration.md) as well.\n")
    return "\n".join(parts)


def _option_row(option: Any) -> tuple[str, ...]:
    flag = ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts))
    repeated = " May be repeated." if option.multiple and "epeat" not in (option.help or "") else ""
    return flag, _default(option), _values(option), one_line(option.help) + repeated


def _default(option: Any) -> str:
    default = option.default
    if option.required:
        return "required"
    if default is None or default == [] or default == () or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`" if option.secondary_opts else ""
    many = default if isinstance(default, list | tuple) else [default]
    return ", ".join(f"`{one.value if isinstance(one, Enum) else one}`" for one in many)


def _values(param: Any) -> str:
    """Its kind, and its choices or bounds."""
    kind = param.type_descriptor.annotation
    inner = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(kind))
    if inner and get_origin(kind) is not None:
        kind = inner[0]
    return NAMES.get(kind, getattr(kind, "__name__", str(kind))) + bounds(param.min, param.max)
