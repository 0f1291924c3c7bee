"""Tiny random models and runners, built in memory in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch

from paceline.assembly.build import assemble
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.llama_shapes import model_shapes
from paceline.models.loader import WeightBag
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.base import Drafter
from tests.support.asked import Sampling

VOCAB = 199


def tiny_spec(vocab_size: int = VOCAB, num_layers: int = 2) -> ModelSpec:
    """A Llama with grouped heads; widths that fit no block size exactly."""
    return ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=112,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def tiny_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> WeightBag:
    """Random weights, scaled so that the next-token distribution is neither flat nor a spike."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in model_shapes(spec).items():
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.35
        tensors[name] = value.to(dtype)
    return WeightBag(tensors)


def tiny_llama(dtype: str, seed: int, vocab_size: int, quantize: str = "none") -> LlamaModel:
    """The model alone. quantize: what it is rounded to."""
    spec = tiny_spec(vocab_size)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = tiny_weights(spec, torch_dtype, seed).rounded(quantize)
    return LlamaModel(spec, weights, torch_dtype, torch.device("cpu"))


def tiny_config(dtype: str, options: Mapping[str, object]) -> NodeConfig:
    """The configuration of a runner over a tiny model; ``options`` are checked by NodeConfig."""
    defaults: dict[str, object] = {"model": "tiny", "dtype": dtype, "kv_cache_tokens": 4096, "max_model_len": 512}
    return NodeConfig.model_validate(defaults | dict(options))


def tiny_runner(dtype: str = "fp32", seed: int = 0, vocab_size: int = VOCAB, /, **options: object) -> ModelRunner:
    """A runner over a tiny model; ``options`` are NodeConfig's."""
    config = tiny_config(dtype, options)
    identity = RunnerIdentity("tiny", f"seed-{seed}", "test", config.quantize)
    return assemble(config, tiny_llama(config.dtype, seed, vocab_size, config.quantize), identity)


def tiny_prefill_runner(dtype: str = "fp32", /, **options: object) -> ModelRunner:
    """A prefill node's runner over the same model."""
    config = tiny_config(dtype, options)
    identity = RunnerIdentity("tiny", "seed-0", "test", config.quantize)
    return assemble(config, tiny_llama(config.dtype, 0, VOCAB, config.quantize), identity, decodes=False)


def primary_of(runner: ModelRunner) -> Drafter:
    """The drafter that has the deployment's heads, whatever stands beside it."""
    return runner.drafter.primary


def tiny_request(
    prompt: list[int] | None = None, *, index: int = 0, max_tokens: int = 24, **params: Unpack[Sampling]
) -> SequenceRequest:
    """A request with a prompt that repeats itself a little, so that n-grams match."""
    if prompt is None:
        generator = torch.Generator().manual_seed(1000 + index)
        phrase = torch.randint(3, VOCAB, (5 + index % 7,), generator=generator).tolist()
        prompt = [*phrase, *phrase[:3], 7 + index % 5, *phrase, *phrase[: index % 4]]
    fields: Sampling = {"temperature": 0.0, "seed": 17 + index}
    sampling = SamplingParams(max_tokens=max_tokens, **(fields | params))
    return SequenceRequest(f"r{index}", tuple(prompt), sampling)
