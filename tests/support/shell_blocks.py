"""The commands that pages show: what stands in their ``sh`` blocks, line by line."""

from __future__ import annotations

import re
import shlex
from itertools import dropwhile, groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", "&", ";"}
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


def pages() -> list[Path]:
    """Every Markdown page that a reader may follow."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("[de]*/README.md"))]


def shell_blocks(page: Path) -> list[str]:
    """Its ``sh`` blocks, whole."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands(block: str) -> list[list[str]]:
    """Simple commands of a block, as lists of words; comments, variables before a command and redirections are off."""
    found: list[list[str]] = []
    pending = ""  # lines of a quoted text that goes on
    for line in block.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = _words(pending)
        except ValueError:  # the quotation is not closed yet
            pending += "\n"
            continue
        pending = ""
        for is_end, group in groupby(words, key=ENDS.__contains__):
            command = [] if is_end else list(dropwhile(ASSIGNMENT.fullmatch, group))
            found += [command[: _redirected(command)]] if command else []
    return found


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(lexer)


def _redirected(command: list[str]) -> int:
    """Where the first redirection begins."""
    return next((i for i, word in enumerate(command) if set(word) <= set("<>&")), len(command))
