"""Which models can have which degrees, and what is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
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
from paceline.ranks.shard import Shard, check_ranks, degrees
from paceline.ranks.weights import ShardTensors
from tests.support.thread_ranks import ranks_spec, ranks_tensors


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
    ("options", "family", "raw", "why"),
    [
        (
            {"tp": 3},
            "llama",
            {"a": 1},
            "3 ranks .* 8 heads, 2 KV heads and 8 slabs: it can have 1, 2, 4, 8",
        ),
        ({"tp": 2}, "deepseek_v3", {"a": 1}, "family deepseek_v3 has 1 .*llama"),
        ({"tp": 2, "quantize": "w8a8"}, "llama", {"a": 1}, "quantised weights have 1"),
        ({"tp": 2}, "llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights have 1"),
        ({"tp": 2}, "llama", {}, "quantised weights have 1"),  # GGUF
        ({"tp": 2, "device": "cuda"}, "llama", {"a": 1}, "device cuda has 1"),
    ],
)
def test_refused(options: dict[str, object], family: str, raw: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        check_ranks(NodeConfig.model_validate(options), replace(ranks_spec(), family=family), raw)
    assert refused.value.key == "tp"


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


def _tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in ranks_tensors(spec, torch.bfloat16).items() if "layers.1" not in name}
