"""Functions, classes and constructors above their limits, and whether a comment says why each reads better so.

Such a comment stands above what is large, at the end of its signature, or, where it is a class, below its docstring.
Fields of a dataclass are no parameters.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST = {"lines": 50, "methods": 20, "parameters": 8}  # of a function, a class, a constructor
FOR_TOOLS = ("# fmt:", "# noqa", "# type:", "# pragma")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Large:
    """A piece that is above a limit."""

    line: int
    name: str
    size: int
    what: str  # a key of MOST
    explained: bool


def large(source: str, nodes: Iterable[ast.AST] | None = None) -> list[Large]:
    """What of a module is above a limit. nodes: all of its syntax tree, where it is parsed already."""
    nodes = ast.walk(ast.parse(source)) if nodes is None else nodes
    pieces = (node for node in nodes if isinstance(node, ast.ClassDef | Function))
    found = [(node, what, size) for node in pieces for what, size in _sizes(node) if size > MOST[what]]
    if not found:  # most modules: reading their comments takes as long as parsing them
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [token for token in tokens if token.type == tokenize.COMMENT and not token.string.startswith(FOR_TOOLS)]
    reasons, lines = {token.start[0] for token in words}, source.splitlines()
    return [
        Large(node.lineno, node.name, size, what, not reasons.isdisjoint(_places(node, lines)))
        for node, what, size in found
    ]


def num_lines(node: Function) -> int:
    """Lines of a function, without its decorators."""
    return (node.end_lineno or 0) - node.lineno + 1


def num_methods(node: ast.ClassDef) -> int:
    """Methods that are defined in a class, properties among them."""
    return sum(isinstance(part, Function) for part in node.body)


def _sizes(node: ast.ClassDef | Function) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.ClassDef):
        yield "methods", num_methods(node)
        return
    yield "lines", num_lines(node)
    if node.name == "__init__":
        yield "parameters", len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1


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
