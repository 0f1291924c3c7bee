"""Every Triton kernel compiles for Hopper: types and control flow, which the interpreter does not check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import compile_kernels
from tests.support.needs import needs_triton


@needs_triton
def test_all_kernels_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, compile_kernels.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("\n") == len(compile_kernels.CALLS)
