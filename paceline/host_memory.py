"""Memory of this process for what is large and long-lived: KV pages, and the buffers that rows pass through."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch

from paceline.huge_pages import HUGE_PAGE

ALIGNMENT = 64  # bytes, torch's own; kernels may load whole cache lines


def host_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zeros that cost nothing until they are touched (``torch.zeros`` writes every byte). Raises
    OSError or MemoryError where there is no address space for them.

    From two huge pages on it comes from the kernel itself, begins with a huge page and asks for them: a copy through
    the memory then has a five-hundredth of the addresses to look up. The C library would take it from what loading a
    model has freed, where it may, and write every byte. Smaller memory is aligned to 64 bytes.
    """
    large = num_bytes >= 2 * HUGE_PAGE
    raw = _mapped(num_bytes + HUGE_PAGE) if large else torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % (HUGE_PAGE if large else ALIGNMENT)
    return raw[start : start + num_bytes]


def _mapped(num_bytes: int) -> torch.Tensor:
    """It goes back to the kernel with the last tensor that shares it."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
