"""Commands of the guides that need no deployment, typed in the order of their page in one folder: each ends well, and
says what the page shows. tests/examples runs those that ask a deployment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from cluster.commands.cli import app
from tests.support.shell_blocks import ROOT, commands

PAGES = {"security.md": 6, "models.md": 1, "sizing.md": 4}  # commands of a page that are run
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ID = re.compile(r"\b(acme|ops)-[0-9a-f]{8}\b")
KEY = re.compile(r"^pl-[\w-]{43}$", re.MULTILINE)


def alone(command: list[str]) -> bool:
    """Whether it asks no deployment, starts none and computes nothing."""
    program, *words = command
    return program == "paceline" and (words[0] in ("keys", "certs", "plan") or "--dry-run" in words)


def same_form(text: str) -> str:
    """A text without the ids and keys that are drawn."""
    return KEY.sub("KEY", ID.sub(r"\1-ID", text)).strip()


@pytest.mark.parametrize("page", PAGES)
def test_commands_say_what_their_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("deploy", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    said, num_run, num_shown = "", 0, 0
    ids: dict[str, str] = {}  # of this run, by the tenant
    for kind, body in BLOCK.findall((ROOT / "docs/guides" / page).read_text(encoding="utf-8")):
        if kind == "text":
            assert same_form(body) == same_form(said)
            num_shown += 1
            continue
        said = ""
        for command in filter(alone, commands(body)):
            words = [ids[word.partition("-")[0]] if ID.fullmatch(word) else word for word in command[1:]]
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, f"{command}: {done.output}"
            ids |= {found[1]: found[0] for found in ID.finditer(done.output)}
            said, num_run = said + done.output, num_run + 1
    assert (num_run, num_shown) == (PAGES[page], 1)


def test_help_begins_with_what_the_quickstart_types() -> None:
    assert list(typer.main.get_command(app).commands)[:4] == ["demo", "serve", "generate", "trace"]  # type: ignore[attr-defined]
