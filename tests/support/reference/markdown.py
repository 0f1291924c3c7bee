"""Markdown of the generated pages: their first lines, tables, and docstrings as paragraphs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

MADE = """\
<!-- Generated from {source}.
Change the descriptions there, then run `make proto`. -->"""


def made_from(source: str) -> str:
    """The comment that says where a page comes from."""
    return MADE.format(source=source)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; bars in cells are escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def one_line(text: str | None) -> str:
    """A description as a cell or a sentence has it: on one line, with Markdown's quotes of code."""
    return " ".join((text or "").replace("``", "`").split())


def paragraphs(docstring: str | None) -> list[str]:
    """A docstring as blocks of Markdown: indented text is code, lines that explain a parameter are items of a list."""
    text = inspect.cleandoc(docstring or "")
    blocks = re.split(r"\n\n(?! )", text)  # code goes on over an empty line, with what stands ahead of it
    return [part for block in blocks for part in _parts(block) if part]


def _parts(block: str) -> list[str]:
    prose, *code = re.split(r"\n\n(?=    )", block, maxsplit=1)
    if re.match(r"[a-z_]+(?:, [a-z_]+)*: ", prose):
        prose = re.sub(r"(?m)^([a-z_]+(?:, [a-z_]+)*): ", lambda found: f"- {_quoted(found[1])}: ", prose)
        prose = re.sub(r"(?m)^(?!- )", "  ", prose)
    return [prose.replace("``", "`"), *(f"```python\n{inspect.cleandoc(one)}\n```" for one in code)]


def _quoted(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def number(value: float) -> str:
    """A bound as people write it: whole where it is, powers of two that limit integers as such."""
    power = {2**31 - 1: "2^31 - 1", 2**32 - 1: "2^32 - 1", 2**64 - 1: "2^64 - 1", -(2**63): "-2^63"}.get(int(value))
    return power or (f"{value:,.0f}" if value == int(value) else f"{value:g}")


def bounds(low: float | None, high: float | None, *, above: bool = False) -> str:
    """What follows a kind: ``, 0 to 1`` or ``, at least 1``. above: low itself is not allowed."""
    if low is None:
        return "" if high is None else f", at most {number(high)}"
    if above:
        return f", above {number(low)}" + ("" if high is None else f", at most {number(high)}")
    return f", at least {number(low)}" if high is None else f", {number(low)} to {number(high)}"
