"""Kernels are compiled once for a host, however many nodes start together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.layers import build


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
