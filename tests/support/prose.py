"""The rules of the prose: what a page, a docstring or a comment may not say, as functions from a text to its faults.

A page is read as Markdown without its code: paragraphs and list items (`Block`), cells of tables, links, anchors.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_LINES = 6  # of a paragraph or a list item in the source
MOST_LINE = 120  # characters of a line
MOST_CELL = 200  # characters of a table's cell

# What a page tells is how things are. These words tell how they came to be, or rest on what the reader cannot have.
HISTORY = (
    "no longer",
    "not any longer",
    "formerly",
    "used to be",
    "was changed",
    "were changed",
    "before this change",
    "before these changes",
    "in an earlier version",
    "since session",
    "at first we",
    "on the same day",
    "of earlier days",
    "that are not kept",
    "script is not kept",
    "as it was before",
)

_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_OPENING = re.compile(r"(?:^|(?<=[.!?])\s+)(Of\b[^.!?]{0,30})")
_LEADING = re.compile(r"^(?:[>*_\s]|(?<![\w`])\[[ x]\])+")
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_ID = re.compile(r'<a (?:id|name)="([^"]+)"></a>')
_CODE = re.compile(r"`[^`]*`")
_SLASHES = re.compile(r"((?:[^\"/]|\"[^\"]*\"|/(?!/))*)//+ ?(.*)")


@dataclass(frozen=True)
class Block:
    """A paragraph or a list item with its own lines, or one cell of a table (``cell``)."""

    line: int  # of the first, from 1
    lines: tuple[str, ...]
    cell: bool = False

    @property
    def text(self) -> str:
        """On one line, without the mark of an item."""
        joined = " ".join(line.strip() for line in self.lines)
        return _LEADING.sub("", _ITEM.sub("", joined))


def prose_lines(page: str) -> list[tuple[int, str]]:
    """The lines of a page with their numbers; those of code blocks and HTML comments are empty."""
    kept, fence, comment = [], "", False
    for number, line in enumerate(page.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and not comment and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
            kept.append((number, ""))
            continue
        comment = comment or (not fence and line.lstrip().startswith("<!--"))
        kept.append((number, "" if fence or comment else line))
        if comment and "-->" in line:
            comment = False
    return kept


def blocks(page: str) -> list[Block]:
    """What of a page is prose, in order. Headings, anchors that stand alone and indented code are none."""
    found: list[Block] = []
    lines: list[str] = []
    start = 0

    def end() -> None:
        if lines:
            found.append(Block(start, tuple(lines)))
            lines.clear()

    for number, line in prose_lines(page):
        bare = line.strip()
        if not bare or bare.startswith("#") or _ID.fullmatch(bare) or (line.startswith("    ") and not lines):
            end()
        elif bare.startswith("|"):
            end()
            found += [Block(number, (cell.strip(),), cell=True) for cell in cells(bare)]
        else:
            if _ITEM.match(line):
                end()
            if not lines:
                start = number
            lines.append(line)
    end()
    return found


def cells(row: str) -> list[str]:
    """The cells of a table's row; a bar in code or behind a backslash is none."""
    inside = _CODE.sub(lambda code: code[0].replace("|", "\0"), row.replace(r"\|", "\0"))
    return [cell.strip().replace("\0", "|") for cell in inside.strip().strip("|").split("|")]


def size_faults(page: str) -> list[str]:
    """Paragraphs, lines and cells that are too long. A line that is one long link is not."""
    faults = []
    for block in blocks(page):
        if block.cell:
            if len(block.lines[0]) > MOST_CELL:
                faults.append(f"{block.line}: a cell of {len(block.lines[0])} characters")
            continue
        if len(block.lines) > MOST_LINES:
            faults.append(f"{block.line}: a paragraph of {len(block.lines)} lines")
        faults += [
            f"{block.line + i}: a line of {len(line)} characters"
            for i, line in enumerate(block.lines)
            if len(line) > MOST_LINE and not _LINK.fullmatch(_LEADING.sub("", line.strip()))
        ]
    return faults


def openings(text: str) -> list[str]:
    """Sentences of a text on one line that begin with "Of"."""
    return [match[1] for match in _OPENING.finditer(text)]


def opening_faults(page: str) -> list[str]:
    """Sentences of a page that begin with "Of"."""
    return [f"{block.line}: a sentence begins {words!r}" for block in blocks(page) for words in openings(block.text)]


def history_faults(page: str) -> list[str]:
    """Words that tell history. What stands in backticks is a name."""
    faults = []
    for block in blocks(page):
        text = _CODE.sub("", block.text).lower()
        faults += [f"{block.line}: {phrase!r}" for phrase in HISTORY if re.search(rf"\b{phrase}\b", text)]
    return faults


def links(page: str) -> list[tuple[int, str]]:
    """Relative links and pictures of a page, with their lines."""
    text = "\n".join(line for _, line in prose_lines(page))
    found = [(text.count("\n", 0, match.start()) + 1, match[1]) for match in _LINK.finditer(text)]
    return [(line, target) for line, target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: str) -> frozenset[str]:
    """What a link to a page may name behind its "#": explicit anchors, and headings as GitHub spells them."""
    headings = [line.lstrip("#").strip() for _, line in prose_lines(page) if line.startswith("#")]
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return frozenset(slugs | set(_ID.findall(page)))


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings by paragraph, and comments with those that go on on the next line, each on one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            line = node.body[0].lineno if docstring else 0
            for paragraph in (docstring or "").split("\n\n"):
                yield line, " ".join(paragraph.split())
    yield from _joined(
        (*token.start, not token.line[: token.start[1]].strip(), token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )


def slash_prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments behind "//", with those that go on on the next line, each on one line."""
    found = ((number, _SLASHES.match(line)) for number, line in enumerate(source.splitlines(), 1))
    return _joined((number, len(match[1]), not match[1].strip(), match[2]) for number, match in found if match)


def _joined(comments: Iterable[tuple[int, int, bool, str]]) -> Iterator[tuple[int, str]]:
    """comments: line, column, whether it has the line to itself, text. One goes on with the comment above it where it
    has the line to itself and the same column."""
    run: list[str] = []
    last = (0, 0)
    for line, column, alone, text in comments:
        if run and not (alone and (line - 1, column) == last):
            yield last[0] - len(run) + 1, " ".join(run)
            run = []
        run.append(text)
        last = line, column
    if run:
        yield last[0] - len(run) + 1, " ".join(run)


def code_faults(source: str) -> list[str]:
    """Docstrings and comments of a Python module with a sentence that begins with "Of"."""
    if "Of" not in source:  # parsing takes longer than all else here
        return []
    return [f"{line}: {words!r}" for line, text in python_prose(source) for words in openings(text)]


def slash_faults(source: str) -> list[str]:
    """Comments behind "//" with a sentence that begins with "Of"."""
    return [f"{line}: {words!r}" for line, text in slash_prose(source) for words in openings(text)]
