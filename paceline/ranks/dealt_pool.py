"""The pools of a node whose sequences are dealt to its ranks. Each sequence has all of its target rows on one of them.

Slots are the node's: with S slots on each rank, those of rank r are r * S to (r + 1) * S - 1. Rank 0's are the same in
its own memory. The drafter runs on rank 0 alone, so its layers have room there for the slots of all ranks.
"""

from __future__ import annotations

import torch

from paceline.kvcache.layout import KvLayer, KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.ranks.channel import Kind
from paceline.ranks.commands import copy_fields, host_slots
from paceline.ranks.leader import Followers


class OwnedPool(KvPool):
    """What lies on one rank. ``own_slots``: of every rank; ``first_slot``: this rank's first."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_size: int, device: torch.device, rank: int, degree: int
    ) -> None:
        """num_pages: that a layer of the target has here."""
        self.rank, self.degree, self.own_slots = rank, degree, num_pages * page_size
        self.first_slot = rank * self.own_slots
        super().__init__(layout, num_pages * degree, page_size, device, layout)

    def _shape(self, layer: KvLayer) -> tuple[int, ...]:
        pages, *rest = super()._shape(layer)
        return (pages // self.degree if layer.owner is LayerOwner.TARGET else pages, *rest)

    def _mine(self, source: torch.Tensor, dest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of some copies whose rows lie here, as slots of this rank's memory."""
        here = source // self.own_slots == self.rank
        return source[here] - self.first_slot, dest[here] - self.first_slot


class FollowerPool(OwnedPool):
    """That of another rank than 0, which has layers of the target alone."""

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """See KvPool; of rows that lie here."""
        return super().gather(layers, slots - self.first_slot)

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """See KvPool; of rows that lie here."""
        super().scatter(layers, slots - self.first_slot, data)

    def copy_slots(self, layers: range, source: torch.Tensor, dest: torch.Tensor) -> None:
        """See KvPool. Rows of other ranks are left to these."""
        super().copy_slots(layers, *self._mine(source, dest))


class LeaderPool(OwnedPool):
    """Rank 0's, through which the node reaches the rows of all ranks. A call moves target rows of one rank, such as a
    sequence's; ``copy_slots`` those of many sequences, each on its own rank."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_size: int, device: torch.device, followers: Followers
    ) -> None:
        """num_pages: of all ranks."""
        super().__init__(layout, num_pages // followers.degree, page_size, device, 0, followers.degree)
        self._followers, self._target = followers, layout.layer_range(LayerOwner.TARGET)

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """See KvPool."""
        target, drafts = self._cut(layers)
        owner = self._owner(slots) if target and len(slots) else 0
        if owner == 0:
            self._followers.finish()
            return super().gather(layers, slots)
        rows = self._followers.gather_of(owner, target, host_slots(slots), self.layout.dtype).to(self.device)
        return torch.cat((rows, super().gather(drafts, slots))) if drafts else rows

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """See KvPool."""
        target, drafts = self._cut(layers)
        owner = self._owner(slots) if target and len(slots) else 0
        if owner == 0:
            return super().scatter(layers, slots, data)
        self._check(f"data for {len(slots)} tokens of layers {layers}", data, (self._elems(layers) * len(slots),))
        size = self._elems(target) * len(slots)
        if drafts:
            super().scatter(drafts, slots, data[size:])
        return self._followers.scatter_of(owner, target, host_slots(slots), data[:size])

    def copy_slots(self, layers: range, source: torch.Tensor, dest: torch.Tensor) -> None:
        """See KvPool. In the order of the commands: forwards that come later find the copies."""
        target, drafts = self._cut(layers)
        if not target or not len(source):
            return super().copy_slots(layers, source, dest)
        source, dest = host_slots(source), host_slots(dest)
        if source.shape != dest.shape or bool((self._owners(source) != self._owners(dest)).any()):
            raise ValueError(f"{len(source)} source slots and {len(dest)} dest slots are not pairs on one rank each")
        with self._followers.running(Kind.COPY_SLOTS, copy_fields(target, source, dest)):
            super().copy_slots(target, *self._mine(source, dest))
            super().copy_slots(drafts, source, dest)

    def _cut(self, layers: range) -> tuple[range, range]:
        """Those of the target, and those of the drafter behind them."""
        middle = min(max(layers.start, self._target.stop), layers.stop)
        return range(layers.start, middle), range(middle, layers.stop)

    def _owners(self, slots: torch.Tensor) -> torch.Tensor:
        """The rank of each slot. Raises IndexError for one that is on none."""
        lowest, highest = (int(bound) for bound in torch.aminmax(slots))
        if lowest < 0 or highest >= self.own_slots * self.degree:
            raise IndexError(f"slots {lowest} to {highest} are not inside the pool")
        return slots // self.own_slots

    def _owner(self, slots: torch.Tensor) -> int:
        """The one rank of all slots. Raises ValueError where there are more."""
        first, last = (int(bound) for bound in torch.aminmax(self._owners(slots)))
        if first != last:
            raise ValueError(f"rows of ranks {first} to {last} do not move together")
        return first
