"""Every public module, class and function of the packages has a docstring.

Public is what has no leading underscore in any part of its dotted path. Exceptions, since their words stand elsewhere:
a method that overrides a documented one of a class of the packages; an RPC of a servicer, which proto/ describes; the
setter of a property; a property of a Protocol without a body, which names a field; and a module without code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("paceline", "kv_transfer", "prefill_node", "decode_node", "cluster", "draft_training", "benchmarks")
GENERATED = ROOT / "paceline" / "v1"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[ast.ClassDef]]  # by name, which two modules may share


def public_modules(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, ast.Module]]:
    """Dotted path and syntax tree of every public module."""
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if GENERATED not in path.parents and all(is_public(part) for part in parts):
                yield ".".join(parts), ast.parse(path.read_text(encoding="utf-8"))


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__main__"


def undocumented(modules: list[tuple[str, ast.Module]]) -> Iterator[str]:
    """The dotted paths of what has no docstring and is no exception."""
    classes: Classes = {}
    for _, module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    for path, module in modules:
        if module.body and not ast.get_docstring(module):
            yield path
        yield from _inside(module, path, classes)


def _inside(owner: ast.Module | ast.ClassDef, path: str, classes: Classes) -> Iterator[str]:
    for node in owner.body:
        if not isinstance(node, Function | ast.ClassDef) or not is_public(node.name):
            continue
        named = f"{path}.{node.name}"
        if not ast.get_docstring(node) and not _is_excepted(node, owner, classes):
            yield named
        if isinstance(node, ast.ClassDef):
            yield from _inside(node, named, classes)


def _is_excepted(node: Function | ast.ClassDef, owner: ast.Module | ast.ClassDef, classes: Classes) -> bool:
    if isinstance(node, ast.ClassDef) or isinstance(owner, ast.Module):
        return False
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(mark.endswith(".setter") for mark in marks):
        return True
    bases = _bases(owner)
    if any(base.endswith("Servicer") for base in bases):
        return True
    if "Protocol" in bases and "property" in marks:
        return ast.unparse(node.body[-1]) == "..."
    return _overrides_documented(node.name, bases, classes)


def _bases(kind: ast.ClassDef) -> list[str]:
    """The names of its bases, without modules and type arguments."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]


def _overrides_documented(method: str, bases: list[str], classes: Classes) -> bool:
    for base in (one for name in bases for one in classes.get(name, ())):
        own = [node for node in base.body if isinstance(node, Function) and node.name == method]
        if any(ast.get_docstring(node) for node in own):
            return True
        if _overrides_documented(method, _bases(base), classes):
            return True
    return False


@cache
def modules() -> list[tuple[str, ast.Module]]:
    return list(public_modules())


def test_everything_public_has_a_docstring() -> None:
    assert len(modules()) > 250
    assert list(undocumented(modules())) == []


def test_no_docstring_begins_with_a_fragment() -> None:
    found = [
        f"{path}: {text.splitlines()[0]}"
        for path, module in modules()
        for node in ast.walk(module)
        if isinstance(node, Function | ast.ClassDef | ast.Module)
        and (text := ast.get_docstring(node) or "").startswith(("Of ", "(", "..."))
    ]
    assert found == []


SOURCE = '''
class Base:
    """A base."""
    def documented(self): "It does."
    def bare(self): pass
class Derived(Base):
    """Derives."""
    def documented(self): pass
    def bare(self): pass
    @property
    def value(self): "A value."
    @value.setter
    def value(self, new): pass
class View(Protocol):
    """A view."""
    @property
    def field(self): ...
    def method(self): ...
class Calls(node_pb2_grpc.NodeServicer):
    """Calls."""
    async def Rpc(self): pass
class Plain:
    def _private(self): pass
class _Hidden:
    def method(self): pass
async def function(): pass
'''


@pytest.mark.parametrize("name", ["Base.bare", "Derived.bare", "View.method", "Plain", "function"])
def test_what_has_none_is_found(name: str) -> None:
    assert f"m.{name}" in undocumented([("m", ast.parse(f'"""M."""\n{SOURCE}'))])


def test_exceptions_and_private_names_are_left_out() -> None:
    found = list(undocumented([("m", ast.parse(SOURCE)), ("empty", ast.parse(""))]))
    assert found == ["m", "m.Base.bare", "m.Derived.bare", "m.View.method", "m.Plain", "m.function"]
