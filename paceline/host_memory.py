"""Memory of this process for what is large and long-lived: KV pages, and the buffers that rows pass through."""

from __future__ import annotations

import numpy as np
import torch

from paceline.huge_pages import HUGE_PAGE

ALIGNMENT = 64  # bytes, torch's own; kernels may load whole cache lines


def host_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zeros that cost nothing until they are touched (``torch.zeros`` writes every byte).

    From two huge pages on it begins with one: numpy then asks the kernel for them (NUMPY_MADVISE_HUGEPAGE), and a copy
    through the memory has a five-hundredth of the addresses to look up. Smaller memory is aligned to 64 bytes.
    """
    alignment = HUGE_PAGE if num_bytes >= 2 * HUGE_PAGE else ALIGNMENT
    raw = torch.from_numpy(np.zeros(num_bytes + alignment, dtype=np.uint8))
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]
