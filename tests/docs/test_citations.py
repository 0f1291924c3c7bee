"""docs/internals/algorithms.md and the code agree: what is cited has an anchor, and the paths on the page exist.

A citation is the page's name and one label or several (``C and F``, ``F5 to F8``, ``D3-D5``), perhaps over a line's end
inside a comment; a label alone in parentheses counts as one too. Nobody cites a document that is not in the repository.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NAME = "algorithms.md"
PAGE = ROOT / "docs" / "internals" / NAME
SUFFIXES = (".py", ".cpp", ".proto", ".md")
LEAST_CITATIONS = 80  # by the page's name: fewer mean that the pattern finds them no more

GAP = r"(?:\s|[#*>]|//)+"  # white space, a line's end, and what the next line of a comment begins with
NUMBERED = r"[A-M]\d{1,2}[a-d]?(?!\w)"
LABEL = rf"(?:{NUMBERED}|[A-M](?!\w))"
JOIN = rf"(?:,{GAP}(?:and{GAP})?|{GAP}(?:and|to){GAP}|-)"
CITATION = re.compile(rf"{re.escape(NAME)}{GAP}(?:sections?{GAP})?({LABEL}(?:{JOIN}{LABEL})*)")
SHORT = re.compile(rf"\(({NUMBERED}(?:{JOIN}{NUMBERED})*)[),;:]")
LINK = re.compile(rf"{re.escape(NAME)}#([\w-]+)")
FOREIGN = re.compile(rf"\bdesign(?:\.md)?(?:,?{GAP}(?:sections?{GAP}|§\s*)?\d|:{GAP}\")")
PATH = re.compile(
    r"`((?:paceline|kv_transfer|prefill_node|decode_node|cluster|draft_training|benchmarks|tests)/[^`\s]+)`"
)


class Citation(NamedTuple):
    """Where labels are cited. ``labels``: in lower case, ranges spelled out."""

    where: str  # path:line
    labels: tuple[str, ...]


@cache
def texts() -> dict[str, str]:
    """Every file that may cite, by its path: tracked, or new and not ignored. Not the page, and not this test."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = sorted({path for path in listed if path.endswith(SUFFIXES)})
    files = {path: ROOT / path for path in paths}
    return {
        path: file.read_text(encoding="utf-8")
        for path, file in files.items()
        if file.is_file() and file not in (PAGE, Path(__file__))
    }


@cache
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@cache
def anchors() -> frozenset[str]:
    return frozenset(re.findall(r'<a id="([^"]+)"></a>', page()))


def spelled_out(cited: str) -> tuple[str, ...]:
    """``F1, F3-F5`` as f1, f3, f4, f5. Raises ValueError for a range that has no members between its ends."""
    found: list[str] = []
    for part in re.finditer(rf"({LABEL})(?:(?:{GAP}to{GAP}|-)({LABEL}))?", cited):
        first, last = part[1], part[2]
        found += [first] if last is None else between(first, last)
    return tuple(label.lower() for label in found)


def between(first: str, last: str) -> list[str]:
    """The labels from ``first`` to ``last``: sections, or numbers of one section."""
    if len(first) == len(last) == 1 and first < last:
        return [chr(code) for code in range(ord(first), ord(last) + 1)]
    ends = first[1:], last[1:]
    if first[0] != last[0] or not all(end.isdigit() for end in ends) or int(ends[0]) >= int(ends[1]):
        raise ValueError(f"{first} to {last} is no range of labels")
    return [f"{first[0]}{number}" for number in range(int(ends[0]), int(ends[1]) + 1)]


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def cited(pattern: re.Pattern[str], only: tuple[str, ...] = SUFFIXES) -> Iterator[Citation]:
    """What ``pattern``, whose first group is labels, finds in all files of these kinds."""
    for path, text in texts().items():
        if path.endswith(only):
            for match in pattern.finditer(text):
                yield Citation(f"{path}:{line_of(text, match.start())}", spelled_out(match[1]))


def without_anchor(citations: Iterator[Citation]) -> list[str]:
    return [f"{where} cites {label}" for where, labels in citations for label in labels if label not in anchors()]


def test_citations_are_found() -> None:
    assert sum(1 for _ in cited(CITATION)) >= LEAST_CITATIONS


def test_every_cited_label_has_an_anchor() -> None:
    assert without_anchor(cited(CITATION)) == []


def test_a_label_without_an_anchor_is_noticed() -> None:
    assert without_anchor(iter([Citation("a.py:1", ("b5c", "b99"))])) == ["a.py:1 cites b99"]


def test_every_label_in_parentheses_has_an_anchor() -> None:
    assert without_anchor(cited(SHORT, only=(".py", ".cpp"))) == []


def test_every_link_to_the_page_has_an_anchor() -> None:
    links = [(path, match[1]) for path, text in texts().items() for match in LINK.finditer(text)]
    links += [(NAME, target) for target in re.findall(r"\]\(#([\w-]+)\)", page())]
    assert [link for link in links if link[1] not in anchors()] == []


def test_anchors_are_unique() -> None:
    twice = Counter(re.findall(r'<a id="([^"]+)"></a>', page())) - Counter(anchors())
    assert not twice


def test_paths_on_the_page_exist() -> None:
    paths = set(PATH.findall(page()))
    assert paths
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_nobody_cites_what_is_not_here() -> None:
    found = [(path, text, match) for path, text in texts().items() for match in FOREIGN.finditer(text)]
    assert [f"{path}:{line_of(text, match.start())} {match[0]!r}" for path, text, match in found] == []


@pytest.mark.parametrize(
    ("comment", "labels"),
    [
        (f'"""Trees ({NAME} D1): node 0."""', "d1"),
        (f"# see {NAME} B5c, B6", "b5c b6"),
        (f"({NAME} C and F, J7)", "c f j7"),
        (f"({NAME} A3-A5)", "a3 a4 a5"),
        (f"({NAME} C8, F5 to F8)", "c8 f5 f6 f7 f8"),
        (f"{NAME} A-C.", "a b c"),
        (f"{NAME} L1's order", "l1"),
        (f"{NAME} B9, G6, and what follows", "b9 g6"),
        (f"The rules of {NAME}\n    section B other than", "b"),
        (f"# as {NAME}\n    # C2b, I3c", "c2b i3c"),
        (f"// {NAME} B5c,\n// E15.", "b5c e15"),
        (f"{NAME} I1, measured", "i1"),
        (f"{NAME} And others", ""),
        (f"{NAME} has them", ""),
    ],
)
def test_what_a_citation_is(comment: str, labels: str) -> None:
    found = [label for match in CITATION.finditer(comment) for label in spelled_out(match[1])]
    assert " ".join(found) == labels


@pytest.mark.parametrize("text", ["F5 to E8", "D5-D3", "B5a-B5c", "A to B5"])
def test_a_range_must_be_one(text: str) -> None:
    with pytest.raises(ValueError, match="no range"):
        spelled_out(text)


@pytest.mark.parametrize("text", ["(design {0}ection 7)", "design {0}ections\n# 4 and 7", "design 5.6", 'design: "X"'])
def test_what_a_foreign_citation_is(text: str) -> None:
    assert FOREIGN.search(text.format("s"))
    assert not FOREIGN.search("stays open by design (a link's)")
