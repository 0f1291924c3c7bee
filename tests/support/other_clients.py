"""Other people's clients and programs, where they are installed: in this Python, or on the PATH."""

from __future__ import annotations

import importlib
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


def client(module: str, package: str = "") -> Any:
    """The module of a client; the test is skipped where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        pytest.skip(f"needs {package or module}")


def run_program(name: str, *arguments: str | Path, folder: Path) -> str:
    """What a program prints when it runs in ``folder``; it must succeed. The test is skipped where it is not
    installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    command = [found, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TOOLS_TIMEOUT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
