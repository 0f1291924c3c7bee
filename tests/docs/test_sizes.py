"""Code is read in pieces: a function has 50 lines at most, a class 20 methods, a constructor 8 parameters.

What is larger says why it reads better so, in a comment (`tests.support.large_pieces`). The page of the tree shows how
large its pieces are and how its rooms import each other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import tree_sizes
from tests.support.large_pieces import large
from tests.support.rooms import Rooms

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "tree.md"
GROUPS = (tree_sizes.SOURCE, tree_sizes.TESTS, ("examples", "deploy"))
APART = 0.15  # of a figure: the page need not follow every commit


def test_what_is_large_says_why() -> None:
    groups = [tree_sizes.pieces(ROOT, folders) for folders in GROUPS]
    assert sum(len(group.module_lines) for group in groups) > 800
    large = [(path.relative_to(ROOT), it) for group in groups for path, it in group.large if not it.explained]
    assert [f"{path}:{it.line}: {it.name} has {it.size} {it.what}" for path, it in large] == []


LONG = '    """Runs."""\n' + "    run()\n" * 58
METHODS = "    def run(self): ...\n" * 21
PARAMETERS = ", ".join(f"p{i}: int" for i in range(9))


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        (f"def f():\n{LONG}", 1),
        (f"def f():  # fmt: skip\n{LONG}", 1),
        (f"def f():\n    # It runs.\n{LONG}", 1),
        (f"@once\nasync def f(\n    a,  # what runs\n):\n{LONG}", 1),
        (f"def f():\n{LONG}".replace("    run()\n", "", 10), 0),
        (f"def f():  # long, since it runs\n{LONG}", 0),
        (f"# Long, since it runs.\n@once\ndef f():\n{LONG}", 0),
        (f"class C:\n{METHODS}", 1),
        (f'class C:\n    """Runs."""\n\n    # It has many methods.\n\n{METHODS}', 0),
        (f"class C:\n    def __init__(self, {PARAMETERS}) -> None:\n        pass", 1),
        (f"class C:\n    def __init__(self, {PARAMETERS}) -> None:  # one a part\n        pass", 0),
    ],
)
def test_what_is_too_large(source: str, faults: int) -> None:
    assert len([it for it in large(source) if not it.explained]) == faults


# -- the page of the tree ---------------------------------------------------------------------------------------------


def shown() -> dict[str, list[float]]:
    """The figures of the tree on the page, the last cell of each row, by the first one. Both tables of sizes have the
    same rows, so a row's name has its table's first cell before it."""
    found, table, before = {}, "", ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|---"):
            table = before
        elif line.startswith("| "):
            before = cells[0]
            found[f"{table}: {cells[0]}"] = numbers(cells[-1])
    return found


def numbers(cell: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,.]*", cell)]


def agree(page: float, tree: float) -> bool:
    """What is 0 stays 0."""
    return page == tree or (page != 0 != tree and abs(page - tree) <= max(2.0, APART * tree))


def test_the_page_shows_the_tree() -> None:
    page, counted = shown(), 0
    for table in tree_sizes.tables([ROOT]):
        for name, cell in table.rows:
            there = page[f"{table.what}: {name}"]
            assert len(there) == len(numbers(cell)), name
            assert all(map(agree, there, numbers(cell))), (table.what, name, there, cell)
            counted += 1
    assert counted > 30


def test_the_page_shows_the_floors_that_contracts_hold() -> None:
    assert f"```text\n{tree_sizes.layers(ROOT)}\n```" in PAGE.read_text(encoding="utf-8")


def test_no_package_has_circles() -> None:
    found = {name: rooms for name, rooms in tree_sizes.all_rooms(ROOT).items() if rooms.circles()}
    assert found == {}


def test_circles_arrows_back_and_floors() -> None:
    """a and b import each other, c imports both, and d is imported by a."""
    arrows = frozenset({("a", "b"), ("b", "a"), ("c", "a"), ("c", "b"), ("a", "d")})
    rooms = Rooms(("a", "b", "c", "d", "e"), arrows)
    assert rooms.circles() == [("a", "b")]
    assert rooms.num_back() == 1
    assert rooms.floors() == [("d", "e"), ("a", "b"), ("c",)]
    three = Rooms(("a", "b", "c"), frozenset({("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}))
    assert (len(three.circles()), three.num_back()) == (1, 2)
