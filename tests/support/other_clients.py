"""Other people's clients and programs, where they are installed: in this Python, or on the PATH."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEY = "none"  # no key is read, and most clients want one
QUESTION = "What is the capital of France, and what is it famous for?"
ANSWER = "Paris"
HELLO = [{"role": "user", "content": QUESTION}]
ASKED = "Which of Paris and Rome is the capital of France? Answer in JSON."
TOOLS_TIMEOUT_S = 240.0


def lacking(item: pytest.Item) -> str:
    """What the test needs by its marks ``client`` (a package) and ``program``, and is not installed; else empty."""
    for mark in item.iter_markers("client"):
        try:
            importlib.metadata.version(mark.args[0])
        except importlib.metadata.PackageNotFoundError:
            return str(mark.args[0])
    return next((str(mark.args[0]) for mark in item.iter_markers("program") if not _path_of(mark.args[0])), "")


def client(module: str) -> Any:
    """A module of a client."""
    return importlib.import_module(module)


def run_program(name: str, *arguments: str | Path, folder: Path) -> str:
    """What a program prints when it runs in ``folder``; it must succeed."""
    found = _path_of(name)
    assert found
    command = [found, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TOOLS_TIMEOUT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
