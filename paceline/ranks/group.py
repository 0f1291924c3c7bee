"""How the ranks of a node put together what each of them has computed. Every rank makes the same calls in the same
order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Channel, Kind
from paceline.ranks.commands import bytes_of


class Group:
    """All ranks of a node, as one of them sees them: each has a channel to rank 0, which puts parts together and tells
    the others. On one host that is less to move than if everybody told everybody.

    A call that a rank does not join in time, or joins out of step, raises NodeUnavailable; the group is of no use from
    then on.
    """

    def __init__(self, rank: int, degree: int, channels: Sequence[Channel], timeout_s: float) -> None:
        """channels: on rank 0 one to every other rank, by rank; else the one to rank 0. timeout_s: of each wait."""
        self.rank, self.degree = rank, degree
        self._channels, self._timeout_s = channels, timeout_s
        self._step = 0

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """part: of the same shape and dtype on every rank -> [degree, *shape] on rank 0, in order of rank; None on the
        others."""
        self._step += 1
        if self.rank:
            self._channels[0].send(Kind.PART, self._step, [bytes_of(part)])
            return None
        return torch.stack([part, *(self._receive(channel, part) for channel in self._channels)])

    def gather_rows(self, part: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor] | None:
        """part: [R, width], of the same width and dtype on every rank; counts: R of each rank, which all of them know
        -> the parts on rank 0, in order of rank; None on the others."""
        self._step += 1
        if self.rank:
            self._channels[0].send(Kind.PART, self._step, [bytes_of(part)])
            return None
        shapes = [part.new_empty(count, part.shape[1]) for count in counts[1:]]
        parts = [self._receive(channel, like) for channel, like in zip(self._channels, shapes, strict=True)]
        return [part, *parts]

    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``value`` on every rank. like: of its shape, dtype and device; its content is not read."""
        self._step += 1
        if self.rank:
            return self._receive(self._channels[0], like)
        assert value is not None
        data = bytes_of(value)
        for channel in self._channels:
            channel.send(Kind.PART, self._step, [data])
        return value

    def shut(self) -> None:
        """End every call that waits. Idempotent, from any thread."""
        for channel in self._channels:
            channel.shut()

    def close(self) -> None:
        """Give the channels back, once no thread uses the group."""
        for channel in self._channels:
            channel.close()

    def _receive(self, channel: Channel, like: torch.Tensor) -> torch.Tensor:
        frame = channel.receive(self._timeout_s)
        if frame.kind is not Kind.PART or frame.number != self._step:
            raise NodeUnavailable(f"a rank is out of step: {frame.kind.name} {frame.number} came at step {self._step}")
        data: Any = frame.fields(np.uint8)[0]
        if data.nbytes != like.nbytes:
            raise NodeUnavailable(f"a rank is out of step: {data.nbytes} bytes came where {like.nbytes} are due")
        return torch.from_numpy(data).view(like.dtype).view(like.shape).to(like.device)
