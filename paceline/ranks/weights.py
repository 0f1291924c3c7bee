"""A rank's part of a checkpoint: only that part is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.models.loader import LazyTensors, WeightBag
from paceline.models.registry import Part, open_checkpoint
from paceline.ranks.group import Group
from paceline.ranks.linear import RowParallelLinear
from paceline.ranks.shard import Cut, Shard


class ShardTensors(Mapping[str, LinearWeight]):
    """A whole checkpoint's tensors, of each what a rank has of it; read on access."""

    def __init__(self, whole: Mapping[str, LinearWeight], shard: Shard) -> None:
        self._whole, self._shard = whole, shard

    def __getitem__(self, name: str) -> LinearWeight:
        cut = self._shard.cut(name)
        if cut is None:
            return self._whole[name]
        run = slice(cut.run.start, cut.run.stop)
        index = (slice(None), run) if cut.columns else (run,)
        if isinstance(self._whole, LazyTensors):
            _check(name, cut, self._whole.layout(name)[1])
            return self._whole.part(name, index)
        whole = self._whole[name]
        assert isinstance(whole, torch.Tensor)  # check_ranks has refused others
        _check(name, cut, whole.shape)
        return whole[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _check(name: str, cut: Cut, shape: Sequence[int]) -> None:
    """A part may have the right shape where the whole has not: ConfigError names the whole one."""
    if len(shape) <= cut.columns or shape[cut.columns] != cut.whole:
        what = "columns" if cut.columns else "rows"
        raise ConfigError("model", f"tensor {name} has shape {tuple(shape)}, expected {cut.whole} {what}")


class ShardBag(WeightBag):
    """A rank's weights. Row-parallel products add what all ranks have of them."""

    def __init__(self, tensors: Mapping[str, LinearWeight], shard: Shard, group: Group) -> None:
        super().__init__(tensors)
        self._shard, self._group = shard, group

    def row_linear(self, weight: LinearWeight, bias: torch.Tensor | None, slabs: int = 1) -> Linear:
        """See WeightBag. slabs: of the local model, which does not know how many the whole one has."""
        assert isinstance(weight, torch.Tensor)
        return RowParallelLinear(weight, bias, self._shard.slabs, self._group)


def open_shard(folder: Path, dtype: torch.dtype, shard: Shard, group: Group) -> ShardBag:
    """A rank's weights of a folder with safetensors, without those of MTP modules. Raises ConfigError for files that
    are missing or damaged."""
    tensors = open_checkpoint(folder, dtype)
    names = frozenset(name for name in tensors if not name.startswith(shard.spec.mtp_prefixes))
    return ShardBag(Part(ShardTensors(tensors, shard), names), shard, group)
