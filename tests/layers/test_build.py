"""Kernels are compiled once for a host, however many nodes start together, and compile for other hosts too."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.layers import build
from tests.support.needs import other_kernels

COMPILER = build.find_compiler() or ""
# With AMX, with AVX-512, with AVX2. A host with AMX compiles the first for itself.
PROCESSORS = (*(("sapphirerapids",) if "amx" not in build.kernel_set() else ()), "x86-64-v4", "x86-64-v3")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was compiled; compiling is pretended."""
    made: list[Path] = []

    def pretended(command: Sequence[str], target: Path) -> None:
        time.sleep(0.1)
        made.append(target)
        target.write_text("")

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(build, "_build", pretended)
    monkeypatch.setattr(build, "LOCK_POLL_S", 0.01)
    return made


def test_nodes_that_start_together_compile_once(built: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.compile_kernels(), range(4)))
    assert paths == set(built)
    assert len(built) == 1


def test_a_lock_that_is_not_given_back_is_done_without(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.0)
    target = build.compile_kernels()
    target.unlink()
    with build._alone(target.with_suffix(".lock")):
        assert build.compile_kernels() == target
    assert built == [target, target]


@pytest.mark.skipif(platform.machine() != "x86_64" or not COMPILER, reason="needs a C++ compiler for x86-64")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_they_compile_for_processors_that_this_host_is_not(processor: str) -> None:
    """Assembled, not run. Mutant: a template parameter as the number of an AMX tile, which the emulated tiles take."""
    assert other_kernels(f"-march={processor}", "-O0").stat().st_size > 0


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_a_host_whose_kernels_do_not_compile_gets_them_without_amx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, asked = build.compile_kernels, list[tuple[str, ...]]()

    def refused(extra_flags: tuple[str, ...] = ()) -> Path:
        asked.append(extra_flags)
        if build.NO_AMX not in extra_flags:
            raise RuntimeError("bad register name")
        return real()  # tests of kernels compile what the flag leaves out

    monkeypatch.setattr(build, "compile_kernels", refused)
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    build.load_kernels.cache_clear()
    library = build.load_kernels()
    build.load_kernels.cache_clear()
    assert library is not None
    assert asked == [(), (build.NO_AMX,)]
    assert "bad register name" in caplog.text
