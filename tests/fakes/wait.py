"""Waiting in tests that have no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Poll until ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain"
        time.sleep(0.005)
