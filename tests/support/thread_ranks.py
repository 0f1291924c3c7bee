"""Nodes of several ranks whose followers are threads of this process; what crosses between them is real frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

import torch

from paceline.attention.select import attention_for
from paceline.errors import NodeUnavailable
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.ranks.channel import Channel
from paceline.ranks.follower import Follower
from paceline.ranks.group import Group
from paceline.ranks.leader import Followers
from paceline.ranks.model import LlamaShard
from paceline.ranks.pool import held_layout
from paceline.ranks.shard import Shard
from paceline.ranks.target import ParallelTarget
from paceline.ranks.weights import ShardBag, ShardTensors

TIMEOUT_S = 20.0


class Meeting:
    """What the threads of a group share."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * degree


class ThreadGroup(Group):
    """Ranks that are threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.degree, self._meeting = rank, len(meeting.parts), meeting

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """See Group."""
        meeting = self._meeting
        try:
            meeting.parts[self.rank] = part
            meeting.barrier.wait(TIMEOUT_S)
            whole = torch.stack(meeting.parts)
            meeting.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise NodeUnavailable("a rank did not join") from None
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        whole = self.all_gather(part)
        return whole if self.rank == 0 else None

    def close(self) -> None:
        """See Group."""
        self._meeting.barrier.abort()


def thread_target(
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    degree: int,
    pages: tuple[int, int] = (256, 16),
    follower: Callable[..., Follower] = Follower,
) -> ParallelTarget:
    """A model of ``degree`` ranks. pages: number and size in every rank's pool. ``close`` ends the threads."""
    meeting, device = Meeting(degree), torch.device("cpu")
    shards = [Shard(spec, degree, rank) for rank in range(degree)]
    models = []
    for shard in shards:
        group = ThreadGroup(meeting, shard.rank)
        bag = ShardBag(ShardTensors(tensors, shard), shard, group)
        models.append(LlamaShard(bag, dtype, device, shard, group))
        bag.finish()
    pairs = [[tuple(map(Channel, socket.socketpair())) for _ in shards[1:]] for _ in range(2)]
    followers = Followers(*([ours for ours, _ in kind] for kind in pairs), timeout_s=TIMEOUT_S)
    threads: list[threading.Thread] = []
    target = ParallelTarget(models[0], shards[0], followers, lambda: [thread.join() for thread in threads])
    layout = KvLayout(target.kv_layers, dtype)
    for shard, model, (_, commands), (_, rows) in zip(shards[1:], models[1:], *pairs, strict=True):
        pool = KvPool(held_layout(layout, shard), *pages)
        attention = attention_for(device, len(shard.heads), len(shard.kv_heads), spec.head_dim)
        loop = follower(model, pool, attention, commands, rows)
        threads.append(threading.Thread(target=_quietly, args=(loop,), daemon=True))
        threads[-1].start()
    return target


def _quietly(loop: Follower) -> None:
    """What ends a follower is told to rank 0."""
    try:
        loop.run()
    except Exception:
        return
