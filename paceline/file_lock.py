"""A lock between processes, on an open file; the kernel gives it back when its holder dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def locked(file: int, timeout_s: float, poll_s: float) -> Iterator[None]:
    """Hold ``file``, a descriptor. Raises TimeoutError when it is not free within ``timeout_s``: its holder may be
    stopped."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process has held the lock for {timeout_s:g} s") from None
            time.sleep(poll_s)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
