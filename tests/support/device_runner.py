"""Tiny models on any device, for tests that run the same body on CPU and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.shapes import write_random_eagle3
from paceline.assembly.build import assemble
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine, Completed
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.layers.bits import layer_bits
from paceline.layers.build import cache_folder
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.models.registry import DTYPES
from paceline.request import SequenceRequest
from tests.support.asked import Sampling
from tests.support.tiny_model import tiny_request, tiny_spec, tiny_weights
from tests.support.untrained_heads import write_tiny_head

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
DEVICES = ("cpu", pytest.param("cuda", marks=GPU))
SMOLLM2_VARIABLE = "PACELINE_SMOLLM2"
HEADS = ("eagle", "eagle3", "medusa", "draft_model")
NARROW, WIDE = "narrow", "wide"  # heads of 16, as tiny models have them; heads of 64, which GPU kernels are made for


def spec_of(geometry: str) -> ModelSpec:
    """NARROW or WIDE."""
    if geometry == NARROW:
        return tiny_spec()
    return replace(tiny_spec(num_layers=4), hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=64)


def device_runner(device: str, geometry: str = NARROW, dtype: str = "fp32", /, **options: object) -> ModelRunner:
    """A runner on ``device``; the weights are the same on all. ``options`` are NodeConfig's."""
    spec, torch_dtype = spec_of(geometry), DTYPES[dtype]
    bag = tiny_weights(spec, torch_dtype)
    bag = WeightBag({name: tensor.to(device) for name, tensor in bag._tensors.items()})
    defaults: dict[str, object] = {"model": "tiny", "kv_cache_tokens": 4096, "max_model_len": 512}
    config = NodeConfig.model_validate(defaults | {"dtype": dtype, "device": device} | options)
    with layer_bits(config.bits, torch.device(device)):
        model = LlamaModel(spec, bag, torch_dtype, torch.device(device))
    return assemble(config, model, RunnerIdentity("tiny", geometry, "test"))


def write_heads(folder: Path, geometry: str) -> Path:
    """Untrained heads, a folder for each drafter that has weights; of WIDE models EAGLE-3 alone."""
    if geometry == WIDE:
        write_random_eagle3(folder / "eagle3", spec_of(WIDE), 120)
    else:
        for name in HEADS:
            write_tiny_head(folder / name, name)
    return folder


def with_heads(options: dict[str, object], heads: Path) -> dict[str, object]:
    """``options`` with the path of the drafter's weights, where it has any."""
    folder = heads / str(options["drafter"])
    return options | ({"drafter_path": str(folder)} if folder.exists() else {})


def mixed_requests(num: int = 6, max_tokens: int = 20) -> list[SequenceRequest]:
    """Greedy and sampled in turn, one with penalties."""
    extras: list[Sampling] = [{"temperature": float(i % 2)} for i in range(num)]
    extras[-1] = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4}
    return [tiny_request(None, index=i, max_tokens=max_tokens, **extra) for i, extra in enumerate(extras)]


def answers(runner: ModelRunner, requests: Seq[SequenceRequest], batch: int = 4) -> list[Completed]:
    """What one process answers; the books are whole afterwards."""
    done = ColocatedEngine(runner, chunk_tokens=16, max_running=batch).generate(requests)
    assert runner.allocator.check_integrity() == []
    return done


def texts(done: Seq[Completed]) -> list[list[int]]:
    """Token ids of each."""
    return [each.token_ids for each in done]


def smollm2_folder() -> Path | None:
    """The real model where it is already: never fetched."""
    named = os.environ.get(SMOLLM2_VARIABLE)
    folder = Path(named) if named else cache_folder() / "models" / "smollm2-135m-instruct"
    return folder if (folder / "config.json").is_file() else None
