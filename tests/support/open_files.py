"""What of this process outlives whatever a test did: its open files and threads."""

from __future__ import annotations

import gc
import os
import time

WAIT_S = 5.0  # a thread of a library ends a moment after its join


def resources() -> frozenset[str]:
    """The process's file descriptors and threads by number."""
    gc.collect()
    return frozenset(f"{kind} {name}" for kind in ("fd", "task") for name in os.listdir(f"/proc/self/{kind}"))


def left_beside(held: frozenset[str]) -> frozenset[str]:
    """What there is besides ``held``, once it is nothing or for WAIT_S. Threads of other tests that end meanwhile do
    not count."""
    deadline = time.monotonic() + WAIT_S
    while (left := resources() - held) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
