"""The process groups of torch.distributed that ranks of one host meet in: gloo for host memory, NCCL for GPUs.

Groups are built over a store of the node and never registered, as links' are. Whatever they open is on loopback.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
POISON_TAG = 1  # nothing is ever sent with it
torch_dist: Any = dist  # torch's type stubs name neither stores nor the options of a group


class Communicator(ABC):
    """One rank's end. ``group`` is torch's process group."""

    group: Any

    @abstractmethod
    def abort(self) -> None:
        """End every call that waits, on this rank at once. From any thread."""


class GlooCommunicator(Communicator):
    """CPU tensors. A call returns when it is done, or raises RuntimeError after ``timeout_s``."""

    def __init__(self, store: Any, rank: int, degree: int, timeout_s: float) -> None:
        options = torch_dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timedelta(seconds=timeout_s), 1
        options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        self.group = torch_dist.ProcessGroupGloo(store, rank, degree, options)
        self._others = [other for other in range(degree) if other != rank]

    def abort(self) -> None:
        """See Communicator. A receive that runs out closes the connection to its rank, and so ends what waits there at
        both ends; gloo's own abort does not."""
        for other in self._others:
            with suppress(RuntimeError):
                self.group.recv([torch.zeros(1, dtype=torch.uint8)], other, POISON_TAG).wait(timedelta(milliseconds=1))


class NcclCommunicator(Communicator):
    """CUDA tensors. A call returns at once, in order with the caller's current stream. It is aborted, never destroyed:
    destroying is collective and would wait for a rank that is gone."""

    def __init__(self, store: Any, rank: int, degree: int, timeout_s: float) -> None:
        # Errors are ours to handle: torch's default tears the process down, and its clean-up would end a kernel early
        # and let it pass for a completed one.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{timeout_s:g}")
        options = torch_dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # a rank that ends while the communicator is built would block this thread for good
        self.group = torch_dist.ProcessGroupNCCL(store, rank, degree, options)

    def abort(self) -> None:
        """See Communicator. Kernels that wait for another rank end too, with undefined data."""
        self.group.abort()


def communicator(store: Any, rank: int, degree: int, device: torch.device, timeout_s: float) -> Communicator:
    """The group of ``device``. Raises RuntimeError where the others do not come within the store's timeout."""
    kind = NcclCommunicator if device.type == "cuda" else GlooCommunicator
    return kind(store, rank, degree, timeout_s)


def has_communicator(device: torch.device) -> bool:
    """Whether this build of torch has that of ``device``."""
    return bool(dist.is_nccl_available() if device.type == "cuda" else dist.is_gloo_available())
