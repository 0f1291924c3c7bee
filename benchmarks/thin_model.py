"""A model with the KV of a real one and next to nothing to compute: for measuring what moves the KV."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.assembly.build import assemble
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.errors import ConfigError
from paceline.layers.build import kernel_set, set_threads
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.llama import LlamaModel
from paceline.models.llama_shapes import model_shapes
from paceline.models.loader import WeightBag
from paceline.models.registry import DTYPES

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
    tensors = {}
    for name, shape in model_shapes(spec).items():
        value = torch.ones(shape) if len(shape) == 1 else 0.1 * torch.randn(shape, generator=generator)
        tensors[name] = value.to(dtype)
    return WeightBag(tensors)
