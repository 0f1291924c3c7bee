"""How the ranks of a node put together what each of them has computed. Every rank makes the same calls in the same
order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch


class Group(ABC):
    """All ranks of a node, as one of them sees them. Nothing is added on the way: parts cross as they are, in order of
    rank, and who gets them adds them.

    A call that a rank does not join in time, or joins out of step, raises NodeUnavailable; the group is of no use from
    then on.
    """

    rank: int
    degree: int
    carries: bool  # whether tensors that belong to a command come by ``broadcast``, and not in the command's frame

    def join(self) -> None:  # noqa: B027  (some are whole when they are made)
        """Meet the other ranks, each of which calls it once, before any other call. Raises NodeUnavailable."""

    @abstractmethod
    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """part: of the same shape and dtype on every rank -> [degree, *shape] on rank 0, in order of rank; None on the
        others."""

    @abstractmethod
    def gather_rows(self, part: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor] | None:
        """part: [R, width], of the same width and dtype on every rank; counts: R of each rank, which all of them know
        -> the parts on rank 0, in order of rank; None on the others."""

    @abstractmethod
    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``value`` on every rank. like: of its shape, dtype and device; its content is not read."""

    def made(
        self, part: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """What ``make`` gives of all parts ([degree, *shape], see ``gather``), on every rank. like: of the result, see
        ``broadcast``. Here rank 0 makes it and tells the others."""
        every = self.gather(part)
        return self.broadcast(None if every is None else make(every), like)

    def share_rows(self, part: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """part, counts: see ``gather_rows`` -> the rows of all ranks, in order of rank, [sum of counts, width], on
        every rank. One whose count is 0 calls it too."""
        every = self.gather_rows(part, counts)
        like = part.new_empty(sum(counts), part.shape[1])
        return self.broadcast(None if every is None else torch.cat(every), like)

    def finish(self) -> None:  # noqa: B027  (some have nothing under way when they return)
        """Wait until what the caller's stream holds is done; then every rank has done its part of it. Raises
        NodeUnavailable once the group was shut, as what is computed with it is not to be used."""

    def late(self) -> str:
        """Why the group should be given up, where a call that has returned is not done in time; empty: it should not.
        From any thread."""
        return ""

    @abstractmethod
    def shut(self) -> None:
        """End every call that waits. Idempotent, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what connects the ranks, once no thread uses the group."""
