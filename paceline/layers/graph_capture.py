"""CUDA graphs: work over fixed memory, recorded once and launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UPS = 2  # runs before the recording: kernels are compiled, workspaces grown, wrappers planned
Work = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Captured:
    """Recorded work. ``outputs`` keep their memory; every ``replay`` writes them anew."""

    outputs: tuple[torch.Tensor, ...]
    replay: Callable[[], None]


class Capture(Protocol):
    """Records work. The work must not wait for the device, and reads its inputs from memory that stays."""

    def __call__(self, work: Work) -> Captured:
        """Run ``work`` a few times, record it; its outputs are those of the recording."""
        ...

    def used_bytes(self) -> int:
        """Device memory that this process holds for tensors; what captures cost is told from it."""
        ...


class CudaCapture:
    """Graphs of one device that share their scratch memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Captured:
        """See Capture."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        torch.cuda.synchronize(self._device)
        return Captured(outputs, graph.replay)

    def used_bytes(self) -> int:
        """See Capture. What other processes do on the device does not count, nor does the driver's own memory for a
        graph."""
        torch.cuda.empty_cache()  # as a capture does: what was freed before would count for it
        return torch.cuda.memory_reserved(self._device)
