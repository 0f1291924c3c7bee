"""Parts put together through the host's memory, over pairs of sockets that nobody else can open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Channel, Kind
from paceline.ranks.commands import bytes_of
from paceline.ranks.group import Group


class SocketGroup(Group):
    """See Group. Each rank has a channel to rank 0, which puts parts together and tells the others. On one host that is
    less to move than if everybody told everybody."""

    carries = False

    def __init__(self, rank: int, degree: int, channels: Sequence[Channel], timeout_s: float) -> None:
        """channels: on rank 0 one to every other rank, by rank; else the one to rank 0. timeout_s: of each wait."""
        self.rank, self.degree = rank, degree
        self._channels, self._timeout_s = channels, timeout_s
        self._step = 0

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        self._step += 1
        if self.rank:
            self._channels[0].send(Kind.PART, self._step, [bytes_of(part)])
            return None
        return torch.stack([part, *(self._receive(channel, part) for channel in self._channels)])

    def gather_rows(self, part: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor] | None:
        """See Group."""
        self._step += 1
        if self.rank:
            self._channels[0].send(Kind.PART, self._step, [bytes_of(part)])
            return None
        shapes = [part.new_empty(count, part.shape[1]) for count in counts[1:]]
        parts = [self._receive(channel, like) for channel, like in zip(self._channels, shapes, strict=True)]
        return [part, *parts]

    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See Group."""
        self._step += 1
        if self.rank:
            return self._receive(self._channels[0], like)
        assert value is not None
        data = bytes_of(value)
        for channel in self._channels:
            channel.send(Kind.PART, self._step, [data])
        return value

    def shut(self) -> None:
        """See Group."""
        for channel in self._channels:
            channel.shut()

    def close(self) -> None:
        """See Group."""
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
