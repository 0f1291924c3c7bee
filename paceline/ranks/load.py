"""Loads a node's model on all of its ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config import NodeConfig
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.registry import DTYPES, model_class, taking_weights
from paceline.ranks.degrees import check_ranks
from paceline.ranks.devices import check_devices, meeting, rank_device
from paceline.ranks.group import Group
from paceline.ranks.options import FollowerOptions
from paceline.ranks.processes import FollowerProcesses
from paceline.ranks.shard import Shard
from paceline.ranks.target import ParallelTarget
from paceline.ranks.weights import ShardBag, open_shard


def load_parallel(config: NodeConfig, folder: Path, num_pages: int) -> ParallelTarget:
    """The target model of ``folder`` on ``config.tp`` ranks: this process, and followers that it starts. ``close`` ends
    them.

    num_pages: of every rank's pool. Raises ConfigError for what several ranks or their devices cannot serve, before
    anything is loaded,
    and NodeUnavailable when a follower does not come up.
    """
    check_folder(config, folder)
    check_devices(config)
    shard = Shard(ModelSpec.from_folder(folder), config.tp, 0, config.attention_dp > 1)
    device = rank_device(config.device, 0)
    with meeting(config) as place:
        processes = FollowerProcesses(
            [FollowerOptions.of(config, str(folder), rank, num_pages, place) for rank in range(1, config.tp)]
        )
        try:
            own = load_shard(folder, DTYPES[config.dtype], device, shard, processes.group, config.quantize)
            processes.wait_ready()
        except BaseException:
            processes.end()
            raise
    return ParallelTarget(own, shard, processes.followers, processes.end)


def check_folder(config: NodeConfig, folder: Path) -> None:
    """See shard.check_ranks; of a model's folder."""
    check_ranks(config, ModelSpec.from_folder(folder))


def load_shard(
    folder: Path, dtype: torch.dtype, device: torch.device, shard: Shard, group: Group, quantize: str = "none"
) -> TargetModel:
    """One rank's part. Raises ConfigError naming whatever is missing, left over or unsupported."""
    bag = open_shard(folder, dtype, shard, group, quantize)
    with taking_weights(folder):
        model = make_shard(bag, dtype, device, shard)
    bag.finish()
    return model


def make_shard(bag: ShardBag, dtype: torch.dtype, device: torch.device, shard: Shard) -> TargetModel:
    """The part of ``shard`` as a model of its own. Layers that a drafter makes of it are whole."""
    model = model_class(shard.spec.family)(shard.local_spec, bag, dtype, device)
    model.spec = shard.spec
    return model
