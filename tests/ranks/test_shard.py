"""Which models can have which degrees, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kv_transfer.layout.reshard import Side
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.models.config import ModelSpec
from paceline.models.loader import LazyTensors
from paceline.models.registry import DTYPES
from paceline.ranks.degrees import check_ranks, degrees
from paceline.ranks.shard import Shard
from paceline.ranks.weights import ShardTensors
from tests.support.quantized_weights import KINDS
from tests.support.thread_ranks import family_spec, ranks_spec, ranks_tensors


@pytest.mark.parametrize(
    ("changes", "fitting"),
    [
        ({}, (1, 2, 4, 8)),
        ({"num_heads": 32, "num_kv_heads": 8}, (1, 2, 4, 8)),
        ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}, (1, 3)),
        ({"num_heads": 28, "num_kv_heads": 4}, (1, 2, 4)),
        ({"num_heads": 24, "num_kv_heads": 3}, (1,)),  # 2, 4 and 8 ranks neither divide 3 heads nor are a multiple
        ({"intermediate_size": 500}, (1,)),
        ({"vocab_size": 70}, (1, 2)),
        ({"num_heads": 32, "num_kv_heads": 1}, (1,)),  # AMX takes 16 query heads of a KV head together, and not 32
        ({"num_heads": 64, "num_kv_heads": 1}, (1, 2)),
    ],
)
def test_degrees(changes: dict[str, int], fitting: tuple[int, ...]) -> None:
    spec = ranks_spec(**changes)
    assert degrees(spec) == fitting
    layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
    for degree in fitting:
        shards = [Shard(spec, degree, rank) for rank in range(degree)]
        sides = [Side(KvLayout((layer,), DTYPES["bf16"]), degree, rank) for rank in range(degree)]
        assert [shard.kv_heads for shard in shards] == [side.heads(0) for side in sides]
        assert [row for shard in shards for row in shard.vocab] == list(range(spec.vocab_size))


@pytest.mark.parametrize(
    ("options", "family", "why"),
    [
        ({"tp": 3}, "llama", "3 ranks .* 8 heads, 2 KV heads, 8 slabs and sums over 256 and 512 .* have 1, 2, 4, 8"),
        ({"tp": 3}, "deepseek_v3", "8 heads, 8 experts, 8 slabs and sums over 256 and 512 and 256 .* 1, 2, 4, 8"),
        ({"tp": 4, "attention_dp": 2}, "deepseek_v3", "2 pools are asked for, but 4 ranks .* can have 1 or 4"),
        ({"tp": 2, "attention_dp": 2}, "llama", "2 pools .* llama has KV heads"),
        ({"tp": 2, "attention_dp": 2, "device": "cuda"}, "deepseek_v3", "2 pools .* on cuda a node has 1"),
        ({"tp": 2, "quantize": "w8a8"}, "llama", "w8a8 .* can have 1: 256 columns are not 8 slabs of .* groups of 64"),
    ],
)
def test_refused(options: dict[str, object], family: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check_ranks(NodeConfig.model_validate(options), family_spec(family))
    assert refused.value.key == ("attention_dp" if "attention_dp" in options else "tp")


def test_groups_of_a_checkpoint_that_ranks_would_part_are_refused() -> None:
    name, spec = "model.layers.0.self_attn.o_proj.weight", ranks_spec()
    tensors = {name: KINDS["w8a8 groups of 128"](torch.ones(96, 256))}
    with pytest.raises(ConfigError, match=f"8 slabs of {name} have 32 columns .* groups of 128 .* have 1"):
        ShardTensors(tensors, Shard(spec, 2, 1))[name]


def test_a_rank_reads_only_its_experts() -> None:
    spec = family_spec("glm4_moe")
    own = list(ShardTensors(ranks_tensors(spec, torch.bfloat16), Shard(spec, 4, 1)))
    assert {name.split(".")[5] for name in own if ".experts." in name} == {"2", "3"}
    assert sum(".shared_experts." in name for name in own) == 3


@pytest.mark.parametrize(
    ("name", "what"),
    [("model.embed_tokens.weight", "519 rows"), ("model.layers.0.mlp.down_proj.weight", "512 columns")],
)
def test_parts_of_another_tensor_are_refused(name: str, what: str, tmp_path: Path) -> None:
    """A tensor that is too large has a part of every rank's shape."""
    spec = ranks_spec()
    tensors = {key: tensor.repeat(2, 2) if key == name else tensor for key, tensor in _tensors(spec).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for whole in (tensors, LazyTensors([tmp_path / "model.safetensors"], torch.bfloat16)):
        with pytest.raises(ConfigError, match=f"{name} has shape .* expected {what}"):
            ShardTensors(whole, Shard(spec, 2, 0))[name]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_part_of_a_file_is_that_of_its_tensors(family: str, tmp_path: Path) -> None:
    """A part of rows, of columns, and of tensors with all experts of a layer."""
    spec = family_spec(family)
    tensors = ranks_tensors(spec, torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    read, shard = LazyTensors([tmp_path / "model.safetensors"], torch.bfloat16), Shard(spec, 4, 1)
    for name, part in ShardTensors(tensors, shard).items():
        of_file = ShardTensors(read, shard)[name]
        assert isinstance(part, torch.Tensor)
        assert isinstance(of_file, torch.Tensor)
        assert torch.equal(of_file, part), name


def _tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in ranks_tensors(spec, torch.bfloat16).items() if "layers.1" not in name}
