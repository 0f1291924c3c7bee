"""The recipe for a new model, followed: one ``TargetModel`` in a file of its own, and one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm, rope_write, silu_mul
from paceline.models.base import ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel
from paceline.models.families import FAMILIES, Family
from paceline.models.loader import WeightBag
from paceline.models.registry import model_class
from support.tiny_model import tiny_request

SIZES = {"vocab_size": 199, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_width": 16}


class GatedLayer:
    """Attention whose output is gated before it is projected: no MLP, one norm."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int) -> None:
        hidden, dim = spec.hidden_size, spec.num_heads * spec.head_dim
        self.spec, self.kv_layer = spec, kv_layer
        self.norm = weights.take(f"{prefix}.norm", (hidden,))
        self.qkv = Linear(weights.take(f"{prefix}.qkv", (3 * dim, hidden)))
        self.gate = Linear(weights.take(f"{prefix}.gate", (dim, hidden)))
        self.out = Linear(weights.take(f"{prefix}.out", (hidden, dim)))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        normed = add_rms_norm(x, residual, self.norm, self.spec.rms_norm_eps)
        q, k, v = (part.contiguous() for part in self.qkv(normed).view(len(x), 3, -1, self.spec.head_dim).unbind(1))
        batch = context.batch
        query = rope_write(q, k, v, table, batch.positions, batch.write_slots, context.kv.data[self.kv_layer])
        scale = self.spec.head_dim**-0.5
        mixed = context.attention.attend(query, context.kv, self.kv_layer, context.plan, scale)
        return self.out(silu_mul(torch.cat((self.gate(normed), mixed.view(len(x), -1)), dim=1)))


class GatedModel(DecoderModel[GatedLayer]):
    """The new model."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> None:
        def make_layer(weights: WeightBag, i: int) -> GatedLayer:
            return GatedLayer(spec, weights, f"model.layers.{i}", i)

        kv_layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> GatedLayer:
        return GatedLayer(self.spec, weights, prefix, kv_layer)


def record() -> Family:
    return Family(
        "gated",
        f"{__name__}:GatedModel",
        kv_heads_optional=True,
        read_fields=lambda raw: {"head_dim": int(raw["head_width"])},
    )


def write_checkpoint(folder: Path) -> Path:
    raw: dict[str, Any] = {
        **SIZES,
        "architectures": ["GatedForCausalLM"],
        "intermediate_size": 0,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    hidden, dim = SIZES["hidden_size"], SIZES["num_attention_heads"] * SIZES["head_width"]
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SIZES["vocab_size"], hidden)}
    for i in range(SIZES["num_hidden_layers"]):
        parts = {"qkv": (3 * dim, hidden), "gate": (dim, hidden), "out": (hidden, dim)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    tensors = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = ["model.norm.weight", *(f"model.layers.{i}.norm" for i in range(SIZES["num_hidden_layers"]))]
    save_file(tensors | {name: torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    return folder


def test_a_new_model_is_a_class_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded from a folder, generates in batches and in chunks, and drafts change none of its tokens."""
    monkeypatch.setitem(FAMILIES, "GatedForCausalLM", record())
    folder = write_checkpoint(tmp_path)
    requests = [tiny_request(index=i, max_tokens=48, temperature=0.7 * (i % 2)) for i in range(3)]
    answers = []
    for options, batch in (({"drafter": "none"}, 1), ({"drafter": "ngram", "num_draft_tokens": 4}, 3)):
        config = NodeConfig.model_validate(
            {"model": str(folder), "dtype": "fp32", "kv_cache_tokens": 2048, "prefix_cache": False} | options
        )
        runner = build_runner(config)
        assert isinstance(runner.model, GatedModel)
        assert runner.bit_exact
        done = ColocatedEngine(runner, chunk_tokens=7, max_running=batch).generate(requests)
        answers.append([answer.token_ids for answer in done])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 3
    assert sum(sum(answer.stats.accepted_per_round) for answer in done) > 0


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_record_names_a_class(architecture: str) -> None:
    found = model_class(FAMILIES[architecture].name)
    assert isinstance(found, type)
    assert issubclass(found, DecoderModel)
