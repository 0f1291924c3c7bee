"""Runs a test file once more with Triton's interpreter in place of a GPU.

Triton reads TRITON_INTERPRET when it is imported, so the kernels' tests run in a process of their own. In such a
process ``runs_triton`` holds for CPU tensors, and the same tests that check torch's operations check the kernels.

The interpreter multiplies tiles by NumPy's OpenBLAS. Its kernels for Haswell and Zen give a row of a tile bits that
depend on the row's place there, which no GPU's matrix unit does, so another kernel is chosen.

Each call of a function inside a kernel patches ``triton.language`` again, though the kernel's launch has done it, and
each operation makes the table of NumPy's types. ``_without_repeats`` saves that time.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

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


def _without_repeats() -> None:
    """The interpreter's results, sooner."""
    from triton.runtime import interpreter

    patch_lang, language, of_type = interpreter._patch_lang, interpreter.tl, interpreter._get_np_dtype
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    patched = False

    class Launch:
        def restore(self) -> None:
            nonlocal patched
            patched = False
            self.scope.restore()

        def __init__(self) -> None:
            nonlocal patched
            self.scope, patched = patch_lang(everything), True

    by_element = functools.cache(of_type)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope() if patched else Launch()
    interpreter._get_np_dtype = lambda kind: of_type(kind) if kind.is_ptr() else by_element(kind.scalar)


if INTERPRETED and has_triton():
    _without_repeats()
