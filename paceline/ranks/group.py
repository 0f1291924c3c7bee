"""How the ranks of a node tell each other tensors. Every rank makes the same calls in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import NodeUnavailable

torch_dist: Any = dist  # torch's type stubs name neither stores nor the options of a group
LOOPBACK = "127.0.0.1"


class Group(ABC):
    """All ranks of a node, as one of them sees them. A call that a rank does not join in time, or that fails, raises
    NodeUnavailable; the group is of no use from then on."""

    rank: int
    degree: int

    @abstractmethod
    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """part: of the same shape and dtype on every rank -> [degree, *shape], in order of rank."""

    @abstractmethod
    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """The same on rank 0; None on the others."""

    @abstractmethod
    def close(self) -> None:
        """End calls that wait. Idempotent, from any thread."""


class GlooGroup(Group):
    """Ranks that are processes, over gloo on loopback."""

    def __init__(self, store: str, rank: int, degree: int, join_timeout_s: float, timeout_s: float) -> None:
        """store: a file that all ranks open and nobody else may write to, empty when the first of them comes; it is not
        needed once every rank is there. timeout_s: of each call. Raises NodeUnavailable when a rank does not come."""
        self.rank, self.degree, self._timeout = rank, degree, timedelta(seconds=timeout_s)
        options = torch_dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timedelta(seconds=join_timeout_s), 1
        try:
            options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            file = torch_dist.FileStore(store, degree)
            file.set_timeout(options._timeout)
            self._group: Any = torch_dist.ProcessGroupGloo(torch_dist.PrefixStore("ranks", file), rank, degree, options)
        except RuntimeError as error:
            raise NodeUnavailable(f"rank {rank} of {degree}: not all ranks came: {error}") from error

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """See Group."""
        whole = part.new_empty(self.degree, *part.shape)
        if part.numel():
            rows, own = _rows(whole), _bytes(part)
            self._wait(lambda: self._group.allgather(rows, own, self._timeout))
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        whole = part.new_empty(self.degree, *part.shape) if self.rank == 0 else None
        if part.numel():
            rows, own = [] if whole is None else _rows(whole), _bytes(part)
            self._wait(lambda: self._group.gather(rows, own, 0, self._timeout))
        return whole

    def close(self) -> None:
        """See Group. Neither abort nor shutdown of torch's group ends a wait; a receive that runs out of time does."""
        with suppress(RuntimeError):
            peer = 0 if self.rank else 1
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], peer, 1).wait(timedelta(milliseconds=1))

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            raise NodeUnavailable(f"a rank did not join within {self._timeout.total_seconds():g} s: {error}") from error


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """gloo knows few dtypes."""
    return part.contiguous().view(-1).view(torch.uint8)


def _rows(whole: torch.Tensor) -> list[torch.Tensor]:
    return list(whole.view(whole.shape[0], -1).view(torch.uint8).unbind(0))
