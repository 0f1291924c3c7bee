"""Runs test files once more with Triton's interpreter in place of a GPU.

Triton reads TRITON_INTERPRET when it is imported, so the kernels' tests run in a process of their own. In such a
process ``runs_triton`` holds for CPU tensors, and the same tests that check torch's operations check the kernels. The
fixture ``run_again_interpreted`` of tests/conftest.py keeps one for all files that its worker runs together.

The interpreter multiplies tiles by NumPy's OpenBLAS. Its kernels for Haswell and Zen give a row of a tile bits that
depend on the row's place there, which no GPU's matrix unit does, so another kernel is chosen.

Each call of a function inside a kernel patches ``triton.language`` again, though the kernel's launch has done it, and
each operation makes the table of NumPy's types. ``_without_repeats`` saves that time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from paceline.triton_support import has_triton
from tests.support.side_by_side import TAIL, Fed, started

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_CORETYPE": "Sandybridge"}

Again = Callable[[str], int]  # what the fixture ``run_again_interpreted`` gives, to be called with a test file


class Interpreter:
    """A worker of ``side_by_side`` in which kernels are interpreted: it takes file after file, and imports torch and
    Triton once. One that died, or holds too much, has a successor."""

    def __init__(self, config: pytest.Config, log: Path) -> None:
        self._config, self._log = config, log
        self._opened = ExitStack()
        self._fed: Fed | None = None

    def run_again(self, file: str) -> int:
        """Run the tests of ``file`` on the kernels; returns how many passed, and fails with those that failed. Skips
        where that cannot be, or where it is happening already."""
        if INTERPRETED:
            pytest.skip("this is the process with the interpreter")
        if not has_triton():
            pytest.skip("needs triton")
        fed = self._fed or self._start()
        from_data = self._config.hook.pytest_report_from_serializable
        name = Path(file).relative_to(self._config.rootpath).as_posix()
        try:
            reports = [from_data(config=self._config, data=data) for data in fed.run([name])]
        except BaseException:  # it died, or its time is over
            fed.process.kill()
            self.end()
            raise
        failed = [f"{report.nodeid}\n{report.longreprtext}" for report in reports if report.failed]
        fed.failed |= bool(failed)
        if not fed.goes_on:
            self.end()
        assert not failed, "\n\n".join(failed)
        return sum(report.passed and report.when == "call" for report in reports)

    def _start(self) -> Fed:
        words = ("-p", "tests.support.side_by_side", "-p", "no:cacheprovider")
        output = self._opened.enter_context(self._log.open("w"))
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self._fed = self._opened.enter_context(started(words, output))
        return self._fed

    def end(self) -> None:
        """Wait for the worker, whose last steps may have failed."""
        fed, self._fed = self._fed, None
        self._opened.close()
        if fed and fed.ended_otherwise():
            pytest.fail(f"Triton's interpreter ended with {fed.process.returncode}: {self._log.read_text()[-TAIL:]}")


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
