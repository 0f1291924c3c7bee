"""The pages that say how to add a part: their code, as modules in the places that the pages name.

A block of Python belongs to the file that the line above it names: "`kv_transfer/transports/tcp.py`:".
"""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "extend"
BLOCK = re.compile(r"^`([^`\n]+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```python$", re.MULTILINE)


def code_of(page: str) -> dict[str, str]:
    """The Python blocks of docs/extend/``page`` by file. AssertionError for one without a file, or two of one file."""
    text = (PAGES / page).read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    code = dict(found)
    assert len(code) == len(found) == len(ANY_BLOCK.findall(text)), f"{page}: a block without a file of its own"
    return code


def load(page: str, file: str) -> ModuleType:
    """The module of a block, executed under the name that its file gives it; not yet importable by others."""
    module, code, shown = ModuleType(name_of(file)), code_of(page)[file], f"docs/extend/{page}:{file}"
    linecache.cache[shown] = len(code), None, code.splitlines(keepends=True), shown  # for tracebacks
    sys.modules.setdefault(module.__name__, module)  # dataclasses look there for the module that they are in
    try:
        exec(compile(code, shown, "exec"), vars(module))
    finally:
        if sys.modules[module.__name__] is module:
            del sys.modules[module.__name__]
    return module


def install(monkeypatch: pytest.MonkeyPatch, page: str, file: str) -> ModuleType:
    """``load``, importable for the length of a test. AssertionError when the tree has such a file already."""
    assert not (PAGES.parents[1] / file).exists(), f"{page} adds {file}, which exists"
    module = load(page, file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def record_of(page: str, file: str, **names: Any) -> Any:
    """The value of a block that is one record or, with a key before a colon, one of a dict."""
    code = code_of(page)[file]
    return eval(f"{{{code}}}" if re.match(r'"[^"]+":', code) else code, names)


def name_of(file: str) -> str:
    """``paceline/models/gated.py`` as a module's name."""
    return file.removesuffix(".py").replace("/", ".")


def collected(module: ModuleType) -> dict[str, Any]:
    """Its tests and fixtures, for the globals of a test file."""
    return {name: value for name, value in vars(module).items() if name.startswith("test_") or _is_fixture(value)}


def _is_fixture(value: object) -> bool:
    return hasattr(value, "_fixture_function_marker") or hasattr(value, "_pytestfixturefunction")
