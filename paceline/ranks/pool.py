"""Rank 0's pool: the target's heads lie on all ranks, the drafter's layers here. What leaves it is in canonical order
over all heads, and what enters it too, so whoever holds it need not know of ranks."""

from __future__ import annotations

import torch

from paceline.kvcache.layout import KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.ranks.channel import Kind
from paceline.ranks.commands import copy_fields, host_slots
from paceline.ranks.dealt_pool import FollowerPool
from paceline.ranks.leader import Followers
from paceline.ranks.shard import Shard


def held_layout(layout: KvLayout, shard: Shard) -> KvLayout:
    """What a rank holds of a node's pool: its own KV heads, or whole latents; on rank 0, the drafter's layers too."""
    layers = (
        shard.held_layer(layer) if layer.owner is LayerOwner.TARGET else layer
        for layer in layout.layers
        if layer.owner is LayerOwner.TARGET or shard.rank == 0
    )
    return layout.with_layers(layers)


def follower_pool(layout: KvLayout, num_pages: int, page_size: int, device: torch.device, shard: Shard) -> KvPool:
    """The pool of another rank than 0. layout: of the target's layers, as ``shard`` holds them."""
    if shard.dealt:
        return FollowerPool(layout, num_pages, page_size, device, shard.rank, shard.degree)
    return KvPool(layout, num_pages, page_size, device)


class ShardedPool(KvPool):
    """See KvPool. ``layout`` is the whole model's; ``data`` and ``read`` have this rank's heads. ``gather`` and
    ``scatter`` go to the followers beside what they compute; NodeUnavailable where a follower does not answer."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_size: int, device: torch.device, shard: Shard, followers: Followers
    ) -> None:
        super().__init__(layout, num_pages, page_size, device, held_layout(layout, shard))
        self.followers, self._replicas = followers, shard.replicas
        self._target = layout.layer_range(LayerOwner.TARGET)
        self._here = self.held.layers[0]  # of a target layer; they are alike
        self._latent = self._here.kind is LayerKind.MLA  # every rank holds all of it

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """See KvPool."""
        here = super().gather(layers, slots)
        target = self._of_target(layers)
        if not target or not len(slots) or self._latent:
            self.followers.finish()
            return here
        shape, size = self._shape_of(target, slots)
        others = self.followers.gather(target, host_slots(slots), self.layout.dtype)
        parts = [here[:size], *(part.to(self.device) for part in others)]
        whole = torch.stack([part.view(shape) for part in parts[:: self._replicas]], dim=3)
        return torch.cat((whole.view(-1), here[size:])) if size < len(here) else whole.view(-1)

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """See KvPool."""
        target = self._of_target(layers)
        if not target or not len(slots):
            return super().scatter(layers, slots, data)
        if self._latent:
            super().scatter(layers, slots, data)  # checks it
            rows = data[: len(target) * len(slots) * self._here.row_elems]
            return self.followers.scatter(target, host_slots(slots), [rows] * (self.followers.degree - 1))
        shape, size = self._shape_of(target, slots)
        runs = self.followers.degree // self._replicas
        whole = size * runs
        rest = self._elems(range(target.stop, layers.stop)) * len(slots)
        self._check(f"data for {len(slots)} tokens of layers {layers}", data, (whole + rest,))
        heads = data[:whole].view(*shape[:3], runs, *shape[3:]).unbind(3)
        parts = [part.contiguous().view(-1) for part in heads]
        super().scatter(layers, slots, torch.cat((parts[0], data[whole:])))
        others = [parts[rank // self._replicas] for rank in range(1, self.followers.degree)]
        return self.followers.scatter(target, host_slots(slots), others)

    def copy_slots(self, layers: range, source: torch.Tensor, dest: torch.Tensor) -> None:
        """See KvPool. In the order of the commands: forwards that come later find the copies."""
        target = self._of_target(layers)
        if not target or not len(source):
            return super().copy_slots(layers, source, dest)
        self._check_slots(source, dest)
        with self.followers.running(Kind.COPY_SLOTS, copy_fields(target, host_slots(source), host_slots(dest))):
            return super().copy_slots(layers, source, dest)

    def _of_target(self, layers: range) -> range:
        """Those of ``layers`` that all ranks hold."""
        return range(layers.start, min(layers.stop, self._target.stop))

    def _shape_of(self, target: range, slots: torch.Tensor) -> tuple[tuple[int, int, int, int, int], int]:
        """Shape of this rank's part of the rows, and its elements."""
        shape = (len(target), len(slots), 2, self._here.num_kv_heads, self._here.head_dim)
        return shape, len(target) * len(slots) * self._here.row_elems

    def _check_slots(self, *slots: torch.Tensor) -> None:
        """Refuse what would fail in the midst of a command."""
        for some in slots:
            lowest, highest = (int(bound) for bound in torch.aminmax(self._slots(some)))
            if lowest < 0 or highest >= self.num_pages * self.page_size:
                raise IndexError(f"slots {lowest} to {highest} are not inside the pool")
        if slots[0].shape != slots[1].shape:
            raise ValueError(f"{len(slots[0])} source slots but {len(slots[1])} dest slots")
