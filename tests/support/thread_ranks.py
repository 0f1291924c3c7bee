"""Nodes of several ranks whose followers are threads of this process. What crosses is real: frames, or by ``rank_sums``
collective what gloo or NCCL moves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from paceline.assembly.build import assemble, num_pages_of
from paceline.attention.select import attention_for
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.kvcache.layout import KvLayout
from paceline.layers.quantized import LinearWeight
from paceline.models import deepseek_shapes, gemma3, gpt_oss, moe_decoder
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.deepseek_config import MlaSpec
from paceline.models.llama_shapes import Shapes, layer_shapes, model_shapes
from paceline.models.loader import WeightBag
from paceline.models.moe_config import MoeSpec, softmax_moe
from paceline.models.registry import DTYPES, model_class
from paceline.ranks.channel import Channel
from paceline.ranks.collective import CollectiveGroup
from paceline.ranks.communicators import torch_dist
from paceline.ranks.devices import SOCKETS, rank_device, sums_of
from paceline.ranks.follower import Follower
from paceline.ranks.group import Group
from paceline.ranks.leader import Followers
from paceline.ranks.load import make_shard
from paceline.ranks.pool import follower_pool, held_layout
from paceline.ranks.shard import Shard
from paceline.ranks.sockets import SocketGroup
from paceline.ranks.target import ParallelTarget
from paceline.ranks.weights import ShardBag, ShardTensors
from tests.support.tiny_model import tiny_config, tiny_spec

TIMEOUT_S = 20.0

FollowerClass = Callable[..., Follower]


def thread_target(
    spec: ModelSpec,
    tensors: Mapping[str, LinearWeight],
    config: NodeConfig,
    degree: int,
    follower: FollowerClass = Follower,
) -> ParallelTarget:
    """A model of ``degree`` ranks. ``close`` ends the threads."""
    dtype, pages = DTYPES[config.dtype], (num_pages_of(config), config.page_size)
    places = [rank_device(config.device, rank) for rank in range(degree)]
    meet = cache(torch_dist.HashStore)  # one for all of them
    (commands, their_commands), (rows, their_rows) = channels(degree), channels(degree)
    lanes, their_lanes = channels(degree)
    sums, their_sums = channels(degree) if sums_of(config) == SOCKETS else ([], [])
    shards = [Shard(spec, degree, rank, config.attention_dp > 1) for rank in range(degree)]
    models, groups = [], []
    for shard in shards:
        group: Group = CollectiveGroup(shard.rank, degree, places[shard.rank], meet, TIMEOUT_S)
        if sums:
            group = SocketGroup(shard.rank, degree, [their_sums[shard.rank - 1]] if shard.rank else sums, TIMEOUT_S)
        bag = ShardBag(ShardTensors(tensors, shard, config.quantize), shard, group)
        bag.rounded(config.quantize)
        models.append(make_shard(bag, dtype, places[shard.rank], shard))
        groups.append(group)
        bag.finish()
    followers = Followers(commands, rows, lanes, groups[0], timeout_s=TIMEOUT_S)
    threads: list[threading.Thread] = []
    target = ParallelTarget(models[0], shards[0], followers, lambda: _end(threads, followers))
    layout = KvLayout.of(target.kv_layers, dtype, config.kv_dtype)
    theirs = (their_commands, their_rows, their_lanes, groups[1:])
    for shard, model, *ends in zip(shards[1:], models[1:], *theirs, strict=True):
        device, geometry = places[shard.rank], (len(shard.heads), len(shard.kv_heads))
        pool = follower_pool(held_layout(layout, shard), *pages, device, shard)
        special = spec.special_attention(spec.max_model_len)
        sees = attention_for(device, *geometry, spec.head_dim, config.attention_wanted, special=special)
        loop = follower(model, pool, sees, *ends)
        threads.append(threading.Thread(target=_quietly, args=(loop,), daemon=True))
        threads[-1].start()
    groups[0].join()
    return target


def channels(degree: int) -> tuple[list[Channel], list[Channel]]:
    """Rank 0's ends and the others', by rank."""
    pairs = [socket.socketpair() for _ in range(1, degree)]
    return [Channel(ours) for ours, _ in pairs], [Channel(theirs) for _, theirs in pairs]


def ranks_spec(kv_heads: int = 2, **changes: Any) -> ModelSpec:
    """A tiny model of 8 slabs, which may have up to 8 ranks; the vocabulary is no multiple of anything."""
    sizes = {"hidden_size": 96, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": kv_heads, "head_dim": 32}
    return replace(tiny_spec(519), **(sizes | changes))


def family_spec(family: str) -> ModelSpec:
    """One of each family, of 8 slabs."""
    grouped = MoeSpec(1, 8, 2, 128, 3, 4, 2, True, 1.5)
    changes: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen3_moe": {"moe": softmax_moe(8, 2, 40, normalise=True), "qk_norm": True},
        "glm4_moe": {"moe": grouped, "rotary_dim": 16, "attention_bias": True},
        "glm4_moe, MLPs on rank 0": {"moe": replace(grouped, intermediate_size=40), "intermediate_size": 112},
        "gemma3": {
            "windows": (16, 0), "local_rope_theta": 1e4, "qk_norm": True, "num_kv_heads": 1, "attention_scale": 0.2,
        },
        "gpt_oss": {
            "moe": softmax_moe(8, 2, 40, normalise=True), "clamp": (1.702, 7.0), "windows": (16, 0),
            "attention_bias": True, "attention_out_bias": True,
        },
        "deepseek_v3": {
            "moe": grouped, "mla": MlaSpec(40, 48, 24, 16, 32, True), "head_dim": 16, "num_kv_heads": 8,
            "num_mtp_modules": 1,
        },
    }  # fmt: skip
    return replace(ranks_spec(), family=family.partition(",")[0], tie_word_embeddings=False, **changes[family])


def _layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    match spec.family:
        case "gemma3":
            return gemma3.layer_shapes(spec)
        case "gpt_oss":
            return gpt_oss.layer_shapes(spec, mxfp4=False)
        case "deepseek_v3":
            return deepseek_shapes.layer_shapes(spec, layer)
    return layer_shapes(spec) if spec.moe is None else moe_decoder.layer_shapes(spec, layer)


def ranks_tensors(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(3)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1.0 + 0.1 * noise if len(shape) == 1 else 0.2 * noise).to(dtype)

    return {name: tensor(shape) for name, shape in model_shapes(spec, lambda i: _layer_shapes(spec, i)).items()}


def ranks_runner(
    degree: int,
    spec: ModelSpec,
    dtype: str = "bf16",
    follower: FollowerClass = Follower,
    weights: Mapping[str, LinearWeight] | None = None,
    /,
    **options: object,
) -> ModelRunner:
    """A runner over such a model, of ``degree`` ranks; one has no group at all. weights: others than
    ``ranks_tensors``. ``options`` are NodeConfig's, with ``decodes`` of assemble."""
    decodes = bool(options.pop("decodes", True))
    config = tiny_config(dtype, options)
    tensors = ranks_tensors(spec, DTYPES[dtype]) if weights is None else weights
    model: TargetModel
    if degree == 1:
        bag = WeightBag(tensors).rounded(config.quantize)
        model = model_class(spec.family)(spec, bag, DTYPES[dtype], torch.device("cpu"))
    else:
        model = thread_target(spec, tensors, config, degree, follower)
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
