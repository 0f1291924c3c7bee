"""A rank that is stopped while its node starts: nothing can be in its channels that says so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable
from paceline.ranks.options import FollowerOptions
from paceline.ranks.processes import FollowerProcesses

SOON_S = 20.0  # far less than a load may take


def test_it_is_given_up_soon(tmp_path: Path) -> None:
    """Mutants: nobody looks whether it is stopped; who looks fails because the node waits for it too."""
    before = set(psutil.Process().children())
    processes = FollowerProcesses([FollowerOptions.of(NodeConfig(tp=2), str(tmp_path), 1, 4)])
    (started,) = set(psutil.Process().children()) - before
    os.kill(started.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(NodeUnavailable, match="rank 1 did not come up"):
            processes.wait_ready()
        assert "rank 1 is stopped for 2 s" in processes.followers.failure
    finally:
        processes.end()
    assert time.monotonic() - began < SOON_S
    assert not psutil.pid_exists(started.pid)
