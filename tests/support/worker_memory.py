"""What a test worker holds, and giving back what it does not need."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)


def memory(field: str) -> int:
    """Bytes of this process: VmHWM is the most that it ever held, RssFile what of files it has mapped, RssAnon what it
    holds beside them; 0 where there is no /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return 0
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def give_back() -> None:
    """Collect garbage, and return what the C library keeps of freed memory to the system."""
    gc.collect()
    _trim(0)
