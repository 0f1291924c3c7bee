"""``python -m tests.support.tree_sizes [FOLDER ...]``: the sizes of a tree's pieces and the imports of its rooms.

They are the tables of docs/internals/tree.md, with a column for each folder; this tree by default. ``--layers`` prints
the floors that import contracts hold instead.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from grimp import ImportGraph

from tests.support.large_pieces import Function, Large, large, num_lines, num_methods
from tests.support.rooms import Rooms, packages_as_rooms, read_graph, rooms_of

ROOT = Path(__file__).parents[2]
SOURCE = ("paceline", "kv_transfer", "prefill_node", "decode_node", "cluster", "draft_training", "benchmarks")
TESTS = ("tests",)
GENERATED = ("paceline", "v1")
INNER = ("paceline.engine", "paceline.spec_decode")  # packages inside others whose rooms are counted too
MANY_METHODS, MANY_ATTRIBUTES, MANY_IMPORTS = 15, 20, 12


@dataclass
class Pieces:
    """What a group of modules is made of."""

    module_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    typed: list[bool] = field(default_factory=list)  # a function each
    documented: dict[str, list[bool]] = field(default_factory=lambda: {"module": [], "function": [], "class": []})
    large: list[tuple[Path, Large]] = field(default_factory=list)  # with the module of each
    wide_classes: int = 0
    busy_modules: int = 0

    def add(self, path: Path, source: str) -> None:
        """Count a module."""
        tree = ast.parse(source)
        self.module_lines.append(len(source.splitlines()))
        self.documented["module"].append(ast.get_docstring(tree) is not None)
        nodes = list(ast.walk(tree))
        self.large += [(path, one) for one in large(source, nodes)]
        self.busy_modules += len(_own_imports(nodes)) > MANY_IMPORTS
        for node in nodes:
            if isinstance(node, Function):
                self._add_function(node)
            elif isinstance(node, ast.ClassDef):
                self.documented["class"].append(ast.get_docstring(node) is not None)
                self.wide_classes += num_methods(node) > MANY_METHODS or len(_attributes(node)) > MANY_ATTRIBUTES

    def _add_function(self, node: Function) -> None:
        self.function_lines.append(num_lines(node))
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.typed.append(
            node.returns is not None
            and all(one.annotation is not None for one in given if one.arg not in ("self", "cls"))
        )
        if not node.name.startswith("_"):
            self.documented["function"].append(ast.get_docstring(node) is not None)


@dataclass(frozen=True)
class Table:
    """Rows of a name and a cell for each tree; ``what`` heads the names."""

    what: str
    rows: list[tuple[str, ...]]


@cache
def pieces(root: Path, folders: tuple[str, ...]) -> Pieces:
    """All modules in folders of a tree that a hand wrote and that have a line."""
    found = Pieces()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.relative_to(root).parts[:2] != GENERATED and source.strip():
            found.add(path, source)
    return found


@cache
def all_rooms(root: Path) -> dict[str, Rooms]:
    """The rooms of the source and of its packages, by what the table calls them."""
    graph = read_graph(root, SOURCE)
    found = {"packages of the source": packages_as_rooms(graph, SOURCE)}
    return found | {f"`{name.replace('.', '/')}`": rooms_of(graph, name) for name in (*SOURCE, *_inner(graph))}


def _inner(graph: ImportGraph) -> list[str]:
    return [name for name in INNER if name in graph.modules]


def tables(roots: Sequence[Path]) -> list[Table]:
    """Rooms, sizes of the source and sizes of tests: a column for each tree."""
    rooms = [{name: _room_cell(one) for name, one in all_rooms(root).items()} for root in roots]
    counted = [pieces(root, folders) for folders in (SOURCE, TESTS) for root in roots]
    sizes = [{name: count(one) for name, count in SIZES.items()} for one in counted]
    return [
        Table("rooms of", _joined(rooms)),
        Table("source", _joined(sizes[: len(roots)])),
        Table("tests", _joined(sizes[len(roots) :])),
    ]


def _joined(columns: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    return [(name, *(column.get(name, "not there") for column in columns)) for name in columns[-1]]


def _room_cell(rooms: Rooms) -> str:
    counts = len(rooms.names), len(rooms.floors()), len(rooms.arrows), rooms.num_back(), len(rooms.circles())
    return " / ".join(map(str, counts))


def _spread(sizes: Iterable[int]) -> str:
    found = sorted(sizes)
    return f"{statistics.median_low(found)} / {found[len(found) * 9 // 10]} / {found[-1]}"


def _share(found: Sequence[bool]) -> str:
    return f"{100 * sum(found) / max(len(found), 1):.1f}"


def _above(what: str) -> Callable[[Pieces], str]:
    def count(found: Pieces) -> str:
        there = Counter(one.explained for _, one in found.large if one.what == what)
        return f"{there.total()} / {there[False]}"

    return count


SIZES: dict[str, Callable[[Pieces], str]] = {
    "modules": lambda p: f"{len(p.module_lines):,}",
    "lines": lambda p: f"{sum(p.module_lines):,}",
    "lines of a module: median / 90 % / most": lambda p: _spread(p.module_lines),
    "lines of a function: median / 90 % / most": lambda p: _spread(p.function_lines),
    "functions with all types, %": lambda p: _share(p.typed),
    "docstrings, %: modules / public functions / classes": lambda p: " / ".join(map(_share, p.documented.values())),
    "functions above 50 lines / without a reason": _above("lines"),
    "classes above 20 methods / without a reason": _above("methods"),
    "constructors above 8 parameters / without a reason": _above("parameters"),
    "classes above 15 methods or 20 attributes": lambda p: str(p.wide_classes),
    "modules that import more than 12 others of the tree": lambda p: str(p.busy_modules),
}


def _own_imports(nodes: Sequence[ast.AST]) -> set[str]:
    own = (*SOURCE, *TESTS)
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in names if name.partition(".")[0] in own}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Those that its methods set, and its fields."""
    found = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name):
            found |= {part.attr} if part.value.id == "self" else set()
    return found


def layers(root: Path) -> str:
    """The floors that import contracts hold, the highest first; rooms of one line do not know each other."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    found = [one for one in contracts if one["type"] == "layers"]
    return "\n\n".join(
        "\n".join([*one.get("containers", ["the tree"]), *(f"  {floor}" for floor in one["layers"])]) for one in found
    )


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.tree_sizes", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT], metavar="FOLDER", help="roots of trees")
    parser.add_argument("--layers", action="store_true", help="print the floors of import contracts")
    options = parser.parse_args()
    if options.layers:
        print("\n\n".join(layers(folder) for folder in options.folders))
        return
    roots = [folder.resolve() for folder in options.folders]
    for table in tables(roots):
        print(
            "\n".join(
                [f"| {table.what} | {' | '.join(root.name for root in roots)} |", "|---" * (1 + len(roots)) + "|"]
            )
        )
        print("\n".join(f"| {' | '.join(row)} |" for row in table.rows), end="\n\n")


if __name__ == "__main__":
    main()
