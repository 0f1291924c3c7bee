"""No page shows a command that does not exist: each ``paceline`` line parses as the command line itself parses it, each
``make`` target, module and file is there. tests/examples runs those that a reader of the quickstart types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core

from cluster.commands.cli import app
from cluster.commands.options import load_config
from paceline.errors import ConfigError
from tests.support.shell_blocks import ROOT, commands, pages, shell_blocks

SHOWN = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {' '.join(command)[:60]}")
    for page in pages()
    for block in shell_blocks(page)
    for command in commands(block)
]
COMMAND = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SERVES = ("serve", "demo")
REFUSED: type[Exception] = typer.BadParameter.__mro__[1]  # typer's base of what is wrong with a command line


@pytest.mark.parametrize("command", SHOWN)
def test_the_command_exists(command: list[str]) -> None:
    assert why_refused(command) == ""


def why_refused(command: list[str]) -> str:
    """Empty for a command that would be taken."""
    try:
        check(command)
    except (AssertionError, REFUSED, ConfigError) as error:
        return repr(error)
    return ""


def check(command: list[str]) -> None:
    """Raises AssertionError, REFUSED or ConfigError for a command that would be refused."""
    program, rest = Path(command[0]).name, command[1:]
    if program == "paceline":
        parse(COMMAND, rest)
    elif program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        assert set(targets) <= TARGETS, command
    elif program.startswith("python") and rest[:1] == ["-m"] and rest[1].split(".")[0] in ("benchmarks", "cluster"):
        path = ROOT / rest[1].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), command
    elif program.startswith("python") and rest and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), command


def parse(command: Any, words: list[str]) -> None:
    """As the command line would, but for running it."""
    if isinstance(command, typer.core.TyperGroup):
        if words != ["--help"]:
            assert words[0] in command.commands, f"{command.name} has no {words[0]}"
            parse(command.commands[words[0]], words[1:])
        return
    context = command.make_context(command.name, list(words), resilient_parsing="--help" in words)
    if command.name in SERVES:
        given: dict[str, Any] = dict(context.params)
        given.pop("verbose", None)
        dry_run, hosts = given.pop("dry_run", False), given.pop("hosts", None)
        assert not dry_run or hosts is None or (ROOT / hosts).is_file(), command
        file = given.pop("config", None)
        there = file is not None and (ROOT / file).is_file()  # others are a reader's own
        load_config(given, ROOT / file if there else None, environment={})


def test_pages_show_commands() -> None:
    """The pattern finds them: a changed fence would leave nothing to check."""
    by_program = [Path(param.values[0][0]).name for param in SHOWN]  # type: ignore[index]
    assert by_program.count("paceline") >= 20
    assert by_program.count("make") >= 3


@pytest.mark.parametrize(
    "line",
    [
        "paceline serv",
        "paceline serve --prefil-nodes 2",
        "paceline serve --drafter eagle9",
        "paceline serve --prefill-nodes 2 --num-draft-tokens many",
        "paceline generate --chat",
        "paceline train-drafter eagle3 --out runs",
        "PACELINE_HOME=/tmp paceline pull",
        "make tset",
        "echo ready && make tset",
        "python -m benchmarks.nothing",
        ".venv/bin/python examples/nothing.py",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert why_refused(commands(line)[-1]) != ""
