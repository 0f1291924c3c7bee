"""The pages are read by a stranger: short paragraphs, full sentences, no history, no link to nowhere.

The rules are in ``support.prose``; here they are held against every page and every module, and against small texts
that break them. Generated pages are held by their generators.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.support import prose

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/", "heads/", "benchmarks/", "examples/", "tests/README.md", "deploy/")
GENERATED = "<!-- Generated"
LEAST_PAGES, LEAST_MODULES, LEAST_SLASHED = 15, 400, 20  # fewer mean that they are not found any more


@cache
def tracked(suffix: str) -> tuple[str, ...]:
    """Files of the repository, tracked or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return tuple(sorted({path for path in listed if path.endswith(suffix) and (ROOT / path).is_file()}))


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def pages() -> list[str]:
    """Those that a hand wrote."""
    mine = [path for path in tracked(".md") if path.startswith(PAGES)]
    return [path for path in mine if GENERATED not in text(path)[:1000]]


def modules() -> list[str]:
    return [path for path in tracked(".py") if not path.endswith(("_pb2.py", "_pb2_grpc.py"))]


def slashed() -> list[str]:
    """Files of the repository whose comments stand behind "//"."""
    return [path for suffix in (".proto", ".h", ".cpp") for path in tracked(suffix)]


def dead_links(path: str) -> list[str]:
    """Links of a page to a file, or to an anchor of a page, that is not there."""
    dead = []
    for line, target in prose.links(text(path)):
        name, _, anchor = target.partition("#")
        file = (ROOT / path).parent / name if name else ROOT / path
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in prose.anchors(file.read_text(encoding="utf-8"))
        ):
            dead.append(f"{line}: {target}")
    return dead


def test_pages_and_modules_are_found() -> None:
    assert len(pages()) >= LEAST_PAGES
    assert len(modules()) >= LEAST_MODULES
    assert len(slashed()) >= LEAST_SLASHED


@pytest.mark.parametrize("path", pages())
def test_paragraphs_and_cells_are_short(path: str) -> None:
    assert prose.size_faults(text(path)) == []


@pytest.mark.parametrize("path", pages())
def test_no_sentence_begins_with_of(path: str) -> None:
    assert prose.opening_faults(text(path)) == []


@pytest.mark.parametrize("path", pages())
def test_no_history(path: str) -> None:
    assert prose.history_faults(text(path)) == []


@pytest.mark.parametrize("path", pages())
def test_links_lead_somewhere(path: str) -> None:
    assert dead_links(path) == []


def test_no_docstring_or_comment_begins_with_of() -> None:
    assert [f"{path}:{fault}" for path in modules() for fault in prose.code_faults(text(path))] == []
    assert [f"{path}:{fault}" for path in slashed() for fault in prose.slash_faults(text(path))] == []


# -- the rules themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "one\n" * 7,
        "- item\n" + "  more\n" * 6,
        "a" * 121,
        "| " + "a" * 201 + " | b |\n|---|---|",
    ],
    ids=["paragraph", "item", "line", "cell"],
)
def test_what_is_too_long(page: str) -> None:
    assert len(prose.size_faults(page)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "one\n" * 6 + "\n" + "two\n" * 6,
        "one\n" * 6 + "- item\n" * 7,
        "```\n" + "a" * 300 + "\n" * 9 + "```\n",
        "<!--\n" + "a" * 300 + "\n" * 9 + "-->\n",
        "| " + "a" * 190 + " | " + "b" * 190 + " |",
        "| `" + "a|" * 90 + "` | b |",
        "# " + "a" * 300,
        "![a picture](" + "a" * 200 + ".png)",
    ],
)
def test_what_is_not_too_long(page: str) -> None:
    assert prose.size_faults(page) == []


@pytest.mark.parametrize(
    "page",
    [
        "Of the nodes one is left.",
        "It runs. Of a kind.",
        "One\nruns. Of\nthis process.",
        "- **Of this** one",
        "1. Of two",
        "| a | Of the node |",
        "> Of it.",
    ],
)
def test_what_an_of_opening_is(page: str) -> None:
    assert len(prose.opening_faults(page)) == 1


@pytest.mark.parametrize(
    "page", ["Often it runs.", "A part\nOf the text", "`Of the`", "```\nOf the\n```", "# Of trees"]
)
def test_what_no_of_opening_is(page: str) -> None:
    assert prose.opening_faults(page) == []


@pytest.mark.parametrize(
    "page", ["It is no longer so.", "It\nused to\nbe so.", "Formerly slow.", "Figures of scripts that are not kept."]
)
def test_what_history_is(page: str) -> None:
    assert len(prose.history_faults(page)) == 1


def test_what_no_history_is() -> None:
    assert prose.history_faults("It takes no longer-lived page. `no longer` is a phrase. It is used to begin.") != []
    assert prose.history_faults("`no longer` is a phrase. It is used to begin. It lives longer.") == []


@pytest.mark.parametrize("target", ["nowhere.md", "../README.md#no-such-heading", "#no-such-anchor"])
def test_a_dead_link_is_noticed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "text", lambda path: f"See [it]({target}), [this](README.md) and [that](a:b).")
    assert [fault.partition(": ")[2] for fault in dead_links("tests/README.md")] == [target]


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ('"""Of this process."""', 1),
        ('def f():\n    """What it is.\n\n    Of the node.\n    """', 1),
        ("x = 1  # Of a link\n", 1),
        ("# It runs. Of\n# late.\n", 1),
        ("# one of\n# Of late\n", 0),
        ("x = 1  # one of\n# Of late\n", 1),
        ("x = 1  # one of\ny = 2  # Of late\n", 1),
        ("x = 1  # one of\n       # Of late\n", 0),
        ("x = 1  # of a link\n", 0),
        ('x = "Of this process."', 0),
    ],
)
def test_what_a_fault_in_code_is(source: str, faults: int) -> None:
    assert len(prose.code_faults(source)) == faults


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("int x;  // It runs. Of late\n", 1),
        ("int x;  // one of\n// Of late\n", 1),
        ("// one of\n// Of late\n", 0),
        ('auto x = "// Of late";\n', 0),
        ("int x = 4 / 2;  // of late\n", 0),
    ],
)
def test_what_a_fault_behind_slashes_is(source: str, faults: int) -> None:
    assert len(prose.slash_faults(source)) == faults
