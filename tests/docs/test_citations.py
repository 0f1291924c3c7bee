"""Pages and code agree: what is cited has an anchor, and the paths that pages name exist.

Most citations are of docs/internals/algorithms.md. Such a citation is the page's name and one label or several (``C and
F``, ``F5 to F8``, ``D3-D5``), perhaps over a line's end inside a comment; a label alone in parentheses counts as one
too. Nobody cites a document that is not in the repository.
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

from tests.support import prose

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
ANCHOR = re.compile(r"\bdocs/([\w/]+\.md)#([\w-]+)")
FOLDERS = "paceline|kv_transfer|prefill_node|decode_node|cluster|draft_training|benchmarks|tests|deploy|heads|proto"
PATH = re.compile(rf"`((?:{FOLDERS})/[^`\s:*]+)(?:::\w+)?`")
BARE = re.compile(r"`(\w+\.(?:py|cpp|h|proto))`")


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


def no_such_anchor(citing: dict[str, str]) -> list[str]:
    """Anchors of pages that texts (by path) cite and that are not there."""
    cited = [(path, match[1], match[2]) for path, text in citing.items() for match in ANCHOR.finditer(text)]
    return [f"{path}: {name}#{anchor}" for path, name, anchor in cited if anchor not in anchors_of(name)]


@cache
def anchors_of(name: str) -> frozenset[str]:
    """Those of a page under docs/; none where there is no such page."""
    file = ROOT / "docs" / name
    return prose.anchors(file.read_text(encoding="utf-8")) if file.is_file() else frozenset()


def test_every_anchor_of_a_page_that_is_cited_is_there() -> None:
    citing = {path: text for path, text in texts().items() if not path.endswith(".md")}
    assert sum(1 for text in citing.values() for _ in ANCHOR.finditer(text)) >= 5
    assert no_such_anchor(citing) == []


def test_an_anchor_that_is_not_there_is_noticed() -> None:
    # put together here, so that this file cites nothing
    cited = [
        f"docs/internals/{end}" for end in ("architecture.md#memory", "architecture.md#nowhere", "nowhere.md#memory")
    ]
    assert [fault.split(": ")[1] for fault in no_such_anchor({"a.py": " ".join(cited)})] == [
        end.removeprefix("docs/") for end in cited[1:]
    ]


PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "extend"]  # these add files


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_on_a_page_exist(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert sorted({name for name in PATH.findall(page) if not (ROOT / name).exists()}) == []


def test_files_that_internals_name_without_a_folder_exist() -> None:
    names = {Path(path).name for path in texts()} | {Path(__file__).name}
    pages = [*sorted((ROOT / "docs" / "internals").glob("*.md")), ROOT / "docs" / "guides" / "gpu.md"]
    missing = [(page.name, name) for page in pages for name in BARE.findall(page.read_text()) if name not in names]
    assert missing == []


def unknown_metrics(page: str) -> list[str]:
    """Metrics that a page names and that docs/metrics.md does not list. A histogram's series count as it."""
    listed = set(re.findall(r"\| `(paceline_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    named = set(re.findall(r"\bpaceline_[a-z_]+\b", page))
    return sorted(name for name in named if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & listed)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_that_a_page_names_exist(path: Path) -> None:
    assert unknown_metrics(path.read_text(encoding="utf-8")) == []


def test_a_metric_that_nobody_has_is_noticed() -> None:
    assert unknown_metrics("rate(paceline_nodes[5m]) and paceline_request_seconds_bucket") == []
    assert unknown_metrics("paceline_nodes_bucket_count or paceline_node") == [
        "paceline_node",
        "paceline_nodes_bucket_count",
    ]


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
