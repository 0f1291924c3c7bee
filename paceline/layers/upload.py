"""Small host arrays to the device, without making the host wait for it, and small results back.

On CUDA an array goes through page-locked memory, so that its copy only queues behind the kernels already launched.
torch's caching host allocator keeps such a block back until the copy that reads it is done, whoever drops the tensor:
nothing here needs a ring of buffers or an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def pinned(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A host tensor with the values of ``array``; page-locked where ``device`` is a GPU."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    source = torch.from_numpy(np.ascontiguousarray(array))
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)


def staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, its own memory; on CUDA the host does not wait."""
    return pinned(array, device).to(device, non_blocking=True)


def staged_index(rows: Int64, device: torch.device) -> torch.Tensor:
    """The same for places that come again and again, int64 [n]: the last of them stay on the device. Nobody may write
    to what is returned. For one thread's stream, and not inside a capture."""
    return _kept(rows.tobytes(), device)


@lru_cache(maxsize=256)
def _kept(rows: bytes, device: torch.device) -> torch.Tensor:
    return staged(np.frombuffer(rows, dtype=np.int64).copy(), device)


def begin_read(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Queue a copy to the host behind what the device has to do already. What is returned waits for that, and for
    nothing that is queued later."""
    if tensor.device.type != "cuda":
        return tensor.cpu
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))

    def wait() -> torch.Tensor:
        done.synchronize()
        return there

    return wait


def staged_together(arrays: Sequence[Int32], device: torch.device) -> list[torch.Tensor]:
    """1-D int32 arrays on ``device`` by one copy: views of one tensor, each at a multiple of 4 elements."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    joined = np.zeros(max(sum(sizes), 4), dtype=np.int32)
    at, views = 0, []
    for array, size in zip(arrays, sizes, strict=True):
        joined[at : at + array.size] = array
        at += size
    whole = staged(joined, device)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        views.append(whole[at : at + array.size])
        at += size
    return views
