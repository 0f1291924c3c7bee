"""docs/troubleshooting.md quotes messages as the code has them: each stands in the source, with its values at the same
places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.shell_blocks import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
FOLDERS = ("cluster", "paceline", "prefill_node", "decode_node", "kv_transfer", "draft_training", "deploy")
VALUE = "…"
PERCENT = re.compile(r"%(?:\.\d+)?[sdrgf]")
MOST = 200  # characters of a cell

MESSAGES = [
    found[1] for line in PAGE.splitlines() if line.startswith("|") and (found := re.match(r"\| `([^`]+)` \|", line))
]


@cache
def literals() -> str:
    """Every text of the source, one a line, its values and formats as ``VALUE``."""
    return "\n".join(text for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for text in _texts(file))


def _texts(file: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield PERCENT.sub(VALUE, node.value)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_the_codes(message: str) -> None:
    assert in_the_source(message)


def in_the_source(message: str) -> bool:
    """Whether some text of the source has ``message`` in it. A value at its ends may be more text there."""
    return message.strip(f"{VALUE} ") in literals()


def test_the_page_has_messages() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and line[2:5].strip("- ") not in ("", "mes")]
    assert len(MESSAGES) == len(rows) > 50


def test_a_message_that_is_not_the_codes_is_found() -> None:
    assert not in_the_source("cannot listen on …")
    assert not in_the_source("no prefill node is alive")
    assert not in_the_source("needs 3 KV pages, the node has 2")


def test_cells_fit_a_page() -> None:
    assert [
        cell for line in PAGE.splitlines() if line.startswith("|") for cell in line.split(" | ") if len(cell) > MOST
    ] == []
