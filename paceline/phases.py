"""What a process that starts is doing, and how long each part took: for its log and for whoever waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_current: list[str] = []  # phases that are going on, the innermost last


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, ``current_phase`` is ``name``; what it took is logged."""
    _current.append(name)
    began = time.monotonic()
    try:
        yield
    finally:
        _current.remove(name)
        log.info("phase %s: %.2f s", name, time.monotonic() - began)


def current_phase() -> str:
    """The innermost phase of this process; empty between phases."""
    return next(reversed(_current), "")
