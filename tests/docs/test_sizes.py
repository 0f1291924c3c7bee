"""Code is read in pieces: a function has 50 lines at most, a class 20 methods, a constructor 8 parameters.

What is larger says why it reads better so, in a comment above it, at the end of its signature, or, where it is a class,
below its docstring. Fields of a dataclass are no parameters.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("paceline", "cluster", "decode_node", "prefill_node", "kv_transfer", "draft_training"),
    *("benchmarks", "examples", "deploy", "tests"),
)
GENERATED = ROOT / "paceline" / "v1"
MOST_LINES, MOST_METHODS, MOST_PARAMETERS = 50, 20, 8
FOR_TOOLS = ("# fmt:", "# noqa", "# type:", "# pragma")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large(source: str) -> list[str]:
    """What of a module is above a limit and has no comment that says why."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef | Function))
    large = [(node, size) for node in nodes for size in _above(node)]
    if not large:  # most modules: reading their comments takes as long as parsing them
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [token for token in tokens if token.type == tokenize.COMMENT and not token.string.startswith(FOR_TOOLS)]
    reasons, lines = {token.start[0] for token in words}, source.splitlines()
    return [f"{node.lineno}: {node.name} {size}" for node, size in large if reasons.isdisjoint(_places(node, lines))]


def _above(node: ast.ClassDef | Function) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        methods = sum(isinstance(part, Function) for part in node.body)
        if methods > MOST_METHODS:
            yield f"has {methods} methods"
    else:
        lines = (node.end_lineno or 0) - node.lineno + 1
        parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
        if lines > MOST_LINES:
            yield f"has {lines} lines"
        if node.name == "__init__" and parameters > MOST_PARAMETERS:
            yield f"has {parameters} parameters"


def _places(node: ast.ClassDef | Function, lines: list[str]) -> set[int]:
    """The lines that a reason may stand on."""
    end = _top(node.body[0]) - 1
    while lines[end - 1].lstrip().startswith("#") or not lines[end - 1].strip():
        end -= 1
    places = {_top(node) - 1, node.lineno - 1, end}
    if isinstance(node, ast.ClassDef) and ast.get_docstring(node):
        places |= set(range(node.body[0].end_lineno or 0, _top(node.body[1])))
    return places


def _top(node: ast.stmt) -> int:
    """The first line of a statement, its decorators counted."""
    decorators = node.decorator_list if isinstance(node, ast.ClassDef | Function) else []
    return min([node.lineno, *(one.lineno for one in decorators)])


def test_what_is_large_says_why() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path.parent != GENERATED]
    assert len(paths) > 800
    assert [f"{path.relative_to(ROOT)}:{it}" for path in paths for it in too_large(path.read_text("utf-8"))] == []


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
    assert len(too_large(source)) == faults
