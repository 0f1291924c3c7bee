"""Parts put together by torch.distributed: NCCL on GPUs, where the host waits for no part, and gloo on CPUs.

Bytes are gathered and told, and never reduced: the order of every sum is the caller's. Where all ranks need a sum, all
of them get all parts and add them alike, which is one collective in place of two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F

from paceline.errors import NodeUnavailable
from paceline.ranks.communicators import Communicator, communicator, torch_dist
from paceline.ranks.group import Group
from paceline.ranks.marks import Marks

JOIN_TIMEOUT_S = 60.0  # for the communicator, which is slow to build on a cold machine
SHUT = "the ranks have ended"
Meet = Callable[[], Any]  # a store of torch that all ranks share


def file_store(path: str, degree: int) -> Any:
    """A store in the file at ``path``, which every rank can open."""
    return torch_dist.FileStore(path, degree)


class CollectiveGroup(Group):
    """See Group. On CUDA a call returns when it is queued, in order with the caller's current stream; ``late`` says
    when one does not end."""

    carries = True

    def __init__(self, rank: int, degree: int, device: torch.device, meet: Meet, timeout_s: float) -> None:
        """device: of all tensors. timeout_s: of each call."""
        self.rank, self.degree, self._device, self._meet, self._timeout_s = rank, degree, device, meet, timeout_s
        self._marks = Marks(device) if device.type == "cuda" else None
        self._communicator: Communicator | None = None
        self._shut, self._lock = False, threading.Lock()

    def join(self) -> None:
        """See Group. A first call builds what later ones take."""
        try:
            store = self._meet()
            store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
            found = communicator(store, self.rank, self.degree, self._device, self._timeout_s)
        except RuntimeError as error:
            raise NodeUnavailable(f"the ranks did not meet: {error}") from error
        with self._lock:
            self._communicator = found
        if self._shut:
            found.abort()
        self._all_gather(torch.zeros(1, dtype=torch.uint8, device=self._device))
        self._finish_within(JOIN_TIMEOUT_S)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        data = _bytes(part)
        every = part.new_empty(self.degree, *part.shape) if self.rank == 0 else None
        if part.numel():
            options = torch_dist.GatherOptions()
            options.rootRank = 0
            places = [] if every is None else [[_bytes(place) for place in every]]
            self._run(lambda group: group.gather(places, [data], options))
        return every

    def gather_rows(self, part: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor] | None:
        """See Group. Parts are as long as the longest on their way."""
        every = self.gather(F.pad(part, (0, 0, 0, max(counts) - part.shape[0])))
        return None if every is None else [rows[:count] for rows, count in zip(every, counts, strict=True)]

    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See Group."""
        told = torch.empty_like(like, memory_format=torch.contiguous_format) if value is None else value.contiguous()
        if told.numel():
            options = torch_dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._run(lambda group: group.broadcast([_bytes(told)], options))
        return told

    def made(
        self, part: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """See Group. Every rank makes it, of the same parts in the same order."""
        return make(self._all_gather(part))

    def share_rows(self, part: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """See Group. One collective; parts are as long as the longest on their way."""
        every = self._all_gather(F.pad(part, (0, 0, 0, max(counts) - part.shape[0])))
        return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])

    def finish(self) -> None:
        """See Group."""
        self._finish_within(self._timeout_s)

    def late(self) -> str:
        """See Group."""
        oldest_s = 0.0 if self._marks is None else self._marks.oldest_s()
        return f"a part of the other ranks is due for {oldest_s:.0f} s" if oldest_s > self._timeout_s else ""

    def shut(self) -> None:
        """See Group."""
        with self._lock:
            first, self._shut, found = not self._shut, True, self._communicator
        if first and found is not None:
            found.abort()

    def close(self) -> None:
        """See Group."""
        self.shut()
        self._communicator = None

    def _all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """[degree, *shape] on every rank."""
        every = part.new_empty(self.degree, *part.shape)
        if part.numel():
            self._run(lambda group: group._allgather_base(_bytes(every), _bytes(part)))
        return every

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Start a collective. On a CPU wait for its end; on CUDA the caller's stream does."""
        found = self._communicator
        if found is None or self._shut:
            raise NodeUnavailable(SHUT)
        try:
            start(found.group).wait()
        except RuntimeError as error:
            said = str(error).partition(". ")[0]  # of gloo; what follows are guesses at the cause
            raise NodeUnavailable(SHUT if self._shut else f"a rank is gone or silent: {said}") from error
        if self._marks is not None:
            self._marks.put()

    def _finish_within(self, timeout_s: float) -> None:
        if self._marks is not None:
            self._marks.wait(timeout_s)
        if self._shut:  # a kernel that was aborted has ended too, with undefined data
            raise NodeUnavailable(SHUT)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, or those of a copy; gloo does not know every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
