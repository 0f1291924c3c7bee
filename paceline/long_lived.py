"""What a process makes once and keeps: the collector of garbage, for which everything in the process waits, is not to
walk modules, models and tables again and again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected inside. Importing torch makes many objects that stay: walking them again and again as they
    grow would make each start of a node longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def settle() -> None:
    """What lives at this call lives as long as the process: no collection walks it. A full one of a router's modules
    stops all of its streams for 0.2 s. What loading has freed goes back to the system."""
    gc.collect()
    gc.freeze()
    give_back_memory()


def give_back_memory() -> None:
    """Return what loading has freed to the system: glibc would keep it in the arenas of the threads that loaded."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
