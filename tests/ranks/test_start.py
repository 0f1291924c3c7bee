"""What a follower runs is what rank 0 runs, and a start that fails is over at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable
from paceline.ranks.options import FollowerOptions
from paceline.ranks.processes import FollowerProcesses


def test_modules_of_the_working_directory_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    processes = FollowerProcesses([FollowerOptions.of(NodeConfig(tp=2), str(tmp_path / "none"), 1, 4)])
    try:
        with pytest.raises(NodeUnavailable, match=r"rank 1 did not come up: .*config\.json"):  # it came as far as that
            processes.wait_ready()
    finally:
        processes.end()


def test_one_that_still_loads_is_not_waited_for(tmp_path: Path) -> None:
    processes = FollowerProcesses([FollowerOptions.of(NodeConfig(tp=2), str(tmp_path), 1, 4)])
    began = time.monotonic()
    processes.end()
    assert time.monotonic() - began < 1.5
