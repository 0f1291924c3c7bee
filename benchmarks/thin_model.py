"""A model with the KV of a real one and next to nothing to compute: for measuring what moves the KV."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.assembly.build import DTYPES, assemble
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.errors import ConfigError
from paceline.layers.build import kernel_set, set_threads
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag

WIDTH = 64  # of hidden rows and MLP


def thin_spec(spec: ModelSpec) -> ModelSpec:
    """``spec`` with one query head per KV head and narrow rows. ConfigError when it is no Llama."""
    if spec.family != "llama":
        raise ConfigError("model", f"{spec.family} has no thin stand-in: this benchmark takes Llama models")
    return replace(spec, hidden_size=WIDTH, intermediate_size=WIDTH, num_heads=spec.num_kv_heads)


def thin_runner(config: NodeConfig, *, decodes: bool) -> ModelRunner:
    """A runner of ``config`` around such a model, with random weights."""
    torch.set_num_threads(config.threads)
    set_threads(config.threads)
    spec, dtype = thin_spec(ModelSpec.from_folder(resolve_model(config.model))), DTYPES[config.dtype]
    model = LlamaModel(spec, _weights(spec, dtype), dtype, torch.device("cpu"))
    return assemble(config, model, RunnerIdentity("thin", "random", kernel_set()), decodes=decodes)


def _weights(spec: ModelSpec, dtype: torch.dtype) -> WeightBag:
    generator = torch.Generator().manual_seed(0)
    kv = spec.num_kv_heads * spec.head_dim
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, WIDTH), "lm_head.weight": (spec.vocab_size, WIDTH)}
    for i in range(spec.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{attention}.{name}_proj.weight": (kv, WIDTH) for name in "qkv"}
        shapes |= {f"{attention}.o_proj.weight": (WIDTH, kv)}
        shapes |= {f"{mlp}.{name}_proj.weight": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    tensors = {name: (0.1 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    for i in range(spec.num_layers):
        norms += [f"model.layers.{i}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    return WeightBag(tensors | {name: torch.ones(WIDTH, dtype=dtype) for name in norms})
