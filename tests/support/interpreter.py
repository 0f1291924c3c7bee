"""Runs a test file once more with Triton's interpreter in place of a GPU.

Triton reads TRITON_INTERPRET when it is imported, so the kernels' tests run in a process of their own. In such a
process ``runs_triton`` holds for CPU tensors, and the same tests that check torch's operations check the kernels.

The interpreter multiplies tiles by NumPy's OpenBLAS. Its kernels for Haswell and Zen give a row of a tile bits that
depend on the row's place there, which no GPU's matrix unit does, so another kernel is chosen.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.triton_support import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_again_interpreted(file: str) -> None:
    """Run the tests of ``file`` on the kernels; skips where that is impossible, or where it is happening already."""
    if INTERPRETED:
        pytest.skip("this is the process with the interpreter")
    if not has_triton():
        pytest.skip("needs triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_CORETYPE": "Sandybridge"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, "every test was skipped there"
