"""Nodes of several ranks whose followers are threads of this process; what crosses between them is real frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.assembly.build import assemble
from paceline.attention.select import attention_for
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.llama_shapes import model_shapes
from paceline.models.loader import WeightBag
from paceline.models.registry import DTYPES
from paceline.ranks.channel import Channel
from paceline.ranks.follower import Follower
from paceline.ranks.group import Group
from paceline.ranks.leader import Followers
from paceline.ranks.model import LlamaShard
from paceline.ranks.pool import held_layout
from paceline.ranks.shard import Shard
from paceline.ranks.target import ParallelTarget
from paceline.ranks.weights import ShardBag, ShardTensors
from tests.support.tiny_model import tiny_config, tiny_spec

TIMEOUT_S = 20.0

FollowerClass = Callable[..., Follower]


def thread_target(
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    degree: int,
    pages: tuple[int, int] = (256, 16),
    follower: FollowerClass = Follower,
    attention: str = "auto",
) -> ParallelTarget:
    """A model of ``degree`` ranks. pages: number and size in every rank's pool; attention: the followers'. ``close``
    ends the threads."""
    device = torch.device("cpu")
    pairs = [[tuple(map(Channel, socket.socketpair())) for _ in range(1, degree)] for _ in range(3)]
    (commands, rows, sums), (their_commands, their_rows, their_sums) = (
        [[pair[end] for pair in kind] for kind in pairs] for end in range(2)
    )
    shards = [Shard(spec, degree, rank) for rank in range(degree)]
    models = []
    for shard in shards:
        channels = [their_sums[shard.rank - 1]] if shard.rank else sums
        group = Group(shard.rank, degree, channels, TIMEOUT_S)
        bag = ShardBag(ShardTensors(tensors, shard), shard, group)
        models.append(LlamaShard(bag, dtype, device, shard, group))
        bag.finish()
    followers = Followers(commands, rows, models[0].group, timeout_s=TIMEOUT_S)
    threads: list[threading.Thread] = []
    target = ParallelTarget(models[0], shards[0], followers, lambda: _end(threads, followers))
    layout = KvLayout(target.kv_layers, dtype)
    for shard, model, *channels in zip(shards[1:], models[1:], their_commands, their_rows, strict=True):
        pool = KvPool(held_layout(layout, shard), *pages)
        sees = attention_for(device, len(shard.heads), len(shard.kv_heads), spec.head_dim, attention)
        loop = follower(model, pool, sees, *channels)
        threads.append(threading.Thread(target=_quietly, args=(loop,), daemon=True))
        threads[-1].start()
    return target


def ranks_spec(kv_heads: int = 2, **changes: Any) -> ModelSpec:
    """A tiny model of 8 slabs, which may have up to 8 ranks; the vocabulary is no multiple of anything."""
    sizes = {"hidden_size": 96, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": kv_heads, "head_dim": 32}
    return replace(tiny_spec(519), **(sizes | changes))


def ranks_tensors(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(3)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1.0 + 0.1 * noise if len(shape) == 1 else 0.2 * noise).to(dtype)

    return {name: tensor(shape) for name, shape in model_shapes(spec).items()}


def ranks_runner(
    degree: int, spec: ModelSpec, dtype: str = "bf16", follower: FollowerClass = Follower, /, **options: object
) -> ModelRunner:
    """A runner over such a model, of ``degree`` ranks; one has no group at all. ``options`` are NodeConfig's, with
    ``decodes`` of assemble."""
    decodes = bool(options.pop("decodes", True))
    config = tiny_config(dtype, options)
    tensors = ranks_tensors(spec, DTYPES[dtype])
    model: TargetModel
    if degree == 1:
        model = LlamaModel(spec, WeightBag(tensors), DTYPES[dtype], torch.device("cpu"))
    else:
        pages = -(-config.kv_cache_tokens // config.page_size), config.page_size
        model = thread_target(spec, tensors, DTYPES[dtype], degree, pages, follower, config.attention)
    return assemble(config, model, RunnerIdentity("tiny", "ranks", "test"), decodes=decodes)


def _end(threads: list[threading.Thread], followers: Followers) -> None:
    for thread in threads:
        thread.join()
    followers.close()


def _quietly(loop: Follower) -> None:
    """What ends a follower is told to rank 0."""
    try:
        loop.run()
    except Exception:
        return
