"""Targets and EAGLE-3 heads in the shape of public ones, with random weights: speed needs no trained ones.

The weights are made on the device, each tensor from the seed and its own name. They are of full size and dense, and
scaled so that the next token follows from the last one by a wide margin (token + SHIFT, or itself where the
embedding is tied): text stays equal under rounding, whatever kernels run. So equal text there says that tokens,
positions and commits are right; that attention is, tests/gpu and trained models have to show.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.llama_shapes import model_shapes
from paceline.models.loader import WeightBag
from paceline.spec_decode.heads.formats.config import Eagle3Config
from paceline.spec_decode.heads.formats.eagle import vocabulary_tensors
from paceline.spec_decode.heads.formats.layer import LayerShape
from paceline.spec_decode.heads.formats.write import write_eagle3

SHIFT = 7919
BRANCHES = 0.5  # norm of what all layers add to the residual stream, in norms of an embedding

_LLAMA_8B = ModelSpec(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    },
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
_QWEN3_06B = replace(
    _LLAMA_8B,
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    rope_scaling=None,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    qk_norm=True,
)
_TINY = replace(
    _LLAMA_8B,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=176,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_scaling=None,
    max_position_embeddings=2048,
)
SHAPES = {"llama-8b": _LLAMA_8B, "qwen3-0.6b": _QWEN3_06B, "tiny": _TINY}
DRAFT_VOCAB = {"llama-8b": 32000, "qwen3-0.6b": 32000, "tiny": 160}


class RandomWeights(Mapping[str, torch.Tensor]):
    """Random tensors of a spec, made when they are asked for, the same each time."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._spec, self._dtype, self._device, self._seed = spec, dtype, device, seed
        self._shapes = model_shapes(spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name == "lm_head.weight":  # row t + SHIFT answers to token t
            embedding = self["model.embed_tokens.weight"]
            return embedding.roll(SHIFT, 0).mul_(1.0 / math.sqrt(shape[1]))
        if name == "model.embed_tokens.weight":
            # A tied table is the LM head too: rows of norm 1 then, which the norms before every layer undo.
            return self._normal(name, shape, 1.0 / math.sqrt(shape[1]) if self._spec.tie_word_embeddings else 1.0)
        gain = 1.0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            gain = BRANCHES / math.sqrt(2 * self._spec.num_layers)
            gain *= 1.0 / math.sqrt(self._spec.hidden_size) if self._spec.tie_word_embeddings else 1.0
        return self._normal(name, shape, gain / math.sqrt(shape[1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(0.0, std, generator=generator)


def next_token(spec: ModelSpec, token_id: int) -> int:
    """What the random target answers to a token."""
    return token_id if spec.tie_word_embeddings else (token_id + SHIFT) % spec.vocab_size


def load_shape(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> LlamaModel:
    """The target of a shape."""
    spec = SHAPES[name]
    bag = WeightBag(RandomWeights(spec, dtype, device, seed))
    model = LlamaModel(spec, bag, dtype, device)
    bag.finish()
    return model


def eagle3_config(spec: ModelSpec, draft_vocab: int) -> Eagle3Config:
    """An EAGLE-3 head whose layer is like the target's own."""
    return Eagle3Config(LayerShape.of_target(spec), spec.vocab_size, draft_vocab, spec.hidden_size)


def write_random_eagle3(folder: Path, spec: ModelSpec, draft_vocab: int, seed: int = 0) -> Eagle3Config:
    """Write such a head with random weights, in the public format, so that the product loads it as any other."""
    config, generator = eagle3_config(spec, draft_vocab), torch.Generator().manual_seed(seed)
    step = spec.vocab_size // draft_vocab
    tensors = vocabulary_tensors(list(range(0, draft_vocab * step, step)), spec.vocab_size)
    for name, shape in config.tensor_shapes().items():
        if name in tensors:
            continue
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            made = torch.empty(shape, dtype=torch.bfloat16)
            tensors[name] = made.normal_(0.0, 1.0 / math.sqrt(shape[1]), generator=generator)
    write_eagle3(folder, tensors, config)
    return config
