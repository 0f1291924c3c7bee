"""A rank's part of a checkpoint. Floats are read in part; a quantised weight is read whole, and its part kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.layers.linear import group_of
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.loader import NOT_ROUNDED, LazyTensors, WeightBag, rounded_already, rounded_weight
from paceline.models.registry import ChosenTensors, open_checkpoint
from paceline.parallel.slabs import SLAB_MULTIPLE, slabs_of, sum_slabs
from paceline.ranks.group import Group
from paceline.ranks.shard import Cut, Shard
from paceline.ranks.together import ShardRanks


class ShardTensors(Mapping[str, LinearWeight]):
    """A whole checkpoint's tensors, of each what a rank has of it; read on access. Those of other ranks' experts are
    not there."""

    def __init__(self, whole: Mapping[str, LinearWeight], shard: Shard, quantize: str = NOT_ROUNDED) -> None:
        """quantize: what weights are rounded to, see WeightBag.rounded. Those that are cut by columns are rounded here,
        as scales are of whole rows."""
        self._whole, self._shard, self._quantize = whole, shard, quantize

    def __getitem__(self, name: str) -> LinearWeight:
        cut = self._shard.cut(name)
        if cut is None:
            return self._whole[name]
        rounded = cut.columns and self._quantize != NOT_ROUNDED
        if isinstance(self._whole, LazyTensors) and not rounded:
            _check(name, cut, self._whole.layout(name)[1])
            return self._whole.part(name, cut.index)
        whole = self._whole[name]
        _check(name, cut, whole.shape)
        if rounded:
            whole = rounded_weight(whole, self._quantize)
        return self._part(name, whole, cut) if isinstance(whole, QuantizedWeight) else whole[cut.index]

    def _part(self, name: str, whole: QuantizedWeight, cut: Cut) -> QuantizedWeight:
        if not cut.columns:
            return whole.rows(cut.run.start, cut.run.stop).copied()
        slabs, group = sum_slabs(self._shard.spec.num_heads), group_of(whole)
        if slabs_of(cut.whole, slabs, group) != slabs:
            raise ConfigError(
                "tp",
                f"{self._shard.degree} ranks are asked for, but the {slabs} slabs of {name} have {cut.whole / slabs:g} "
                f"columns each, no whole number of groups of {group} in blocks of {SLAB_MULTIPLE}: it can have 1",
            )
        return whole.columns(cut.run.start, cut.run.stop).copied()

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._whole if self._shard.holds(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _check(name: str, cut: Cut, shape: Sequence[int]) -> None:
    """A part may have the right shape where the whole has not: ConfigError names the whole one."""
    if len(shape) <= cut.columns or shape[cut.columns] != cut.whole:
        what = "columns" if cut.columns else "rows"
        raise ConfigError("model", f"tensor {name} has shape {tuple(shape)}, expected {cut.whole} {what}")


class ShardBag(WeightBag):
    """A rank's weights."""

    def __init__(self, tensors: ShardTensors | Mapping[str, LinearWeight], shard: Shard, group: Group) -> None:
        """tensors: of ``shard``."""
        super().__init__(tensors)
        self._shard, self.ranks = shard, ShardRanks(shard, group)

    def take_linear(self, name: str, shape: tuple[int, int] | None = None) -> LinearWeight:
        """See WeightBag. What is cut by columns comes rounded."""
        cut = self._shard.cut(name)
        return self._linear(name, shape) if cut is not None and cut.columns else super().take_linear(name, shape)


def open_shard(folder: Path, dtype: torch.dtype, shard: Shard, group: Group, quantize: str = NOT_ROUNDED) -> ShardBag:
    """A rank's weights of a folder, or of a GGUF file, without those of MTP modules. Raises ConfigError for files that
    are missing or damaged."""
    tensors = open_checkpoint(folder, dtype)
    if quantize != NOT_ROUNDED and not isinstance(tensors, LazyTensors):
        raise rounded_already()
    own = ShardTensors(tensors, shard, quantize)
    names = frozenset(name for name in own if not name.startswith(shard.spec.mtp_prefixes))
    bag = ShardBag(ChosenTensors(own, names), shard, group)
    bag.rounded(quantize)
    return bag
