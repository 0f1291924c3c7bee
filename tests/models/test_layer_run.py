"""Layers that run together give the logits and the KV of their steps one by one, on any threads and for any rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers import kv8
from paceline.layers.build import set_threads
from paceline.models.base import AuxCapture, ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel, runs_of
from tests.support.needs import needs_kernels
from tests.support.tiny_model import tiny_spec, tiny_weights

LAYERS, PAGE, PAGES = 3, 16, 16
SLOTS = torch.randperm(PAGE * PAGES, generator=torch.Generator().manual_seed(5)).to(torch.int32)
SPECS = {
    "Llama": tiny_spec(num_layers=LAYERS),
    "Qwen2": replace(tiny_spec(num_layers=LAYERS), attention_bias=True, tie_word_embeddings=False),
    "Qwen3": replace(tiny_spec(num_layers=LAYERS), qk_norm=True, num_heads=18, intermediate_size=544, head_dim=32),
}
BATCHES = {
    "a row": [Segment.linear([5], 40, SLOTS)],
    "8 rows of two requests": [Segment.linear([1, 2, 3], 30, SLOTS), Segment.linear([4, 5, 6, 7, 8], 17, SLOTS[100:])],
    "a tree": [Segment.tree([9, 8, 7, 6, 5, 4], [-1, 0, 0, 1, 1, 2], 33, SLOTS)],
    "more rows than run in one region": [Segment.linear(list(range(20)), 12, SLOTS)],
}


@pytest.fixture(autouse=True)
def _one_thread_after() -> Iterator[None]:
    yield
    set_threads(1)


def outcome(
    model: LlamaModel, segments: list[Segment], aux: tuple[int, ...] = (), kv_dtype: str = "auto"
) -> list[torch.Tensor]:
    """Logits, KV and what drafters see, after a forward over the same random KV every time."""
    kv = KvPool(KvLayout.of(model.kv_layers, model.dtype, kv_dtype), PAGES, PAGE)
    for i, (pages, layer) in enumerate(zip(kv.data, model.kv_layers, strict=True)):
        shape = (*pages.shape[:-1], layer.head_dim)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(model.dtype)
        pages.copy_(kv8.round_rows(noise) if kv.layout.is_int8 else noise)
    capture = AuxCapture(aux)
    context = ForwardContext.build(ForwardBatch.build(segments), kv, CpuAttention())
    logits = model.logits(model.forward(context, capture))
    return [logits, *kv.data, *([capture.rows()] if aux else [])]


def made(spec: ModelSpec, dtype: torch.dtype, scheme: str) -> LlamaModel:
    return LlamaModel(spec, tiny_weights(spec, dtype).rounded(scheme), dtype, torch.device("cpu"))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype", "scheme", "kv_dtype"),
    [
        ("Llama", torch.bfloat16, "none", "auto"),
        ("Llama", torch.bfloat16, "w4a8", "auto"),
        ("Qwen2", torch.float32, "none", "auto"),
        ("Qwen2", torch.bfloat16, "w8a8", "auto"),
        ("Qwen3", torch.bfloat16, "none", "auto"),
        ("Qwen3", torch.bfloat16, "w4a16", "auto"),
        ("Llama", torch.bfloat16, "none", "int8"),
        ("Qwen3", torch.float32, "none", "int8"),
    ],
)
def test_together_gives_the_bits_of_the_steps(name: str, dtype: torch.dtype, scheme: str, kv_dtype: str) -> None:
    """Mutants: threads do not wait after a product or rope; the stream is given back before all have copied it; a norm
    that adds twice; of an int8 cache, a row that is rounded to the slot of its neighbour."""
    model = made(SPECS[name], dtype, scheme)
    calls = [layer.calls for layer in model.layers]
    for batch in BATCHES.values():
        for layer in model.layers:
            layer.calls = None
        steps = outcome(model, batch, (0, 2, LAYERS), kv_dtype)
        for layer, its_calls in zip(model.layers, calls, strict=True):
            layer.calls = its_calls
        for threads in (1, 2, 3):
            set_threads(threads)
            for _ in range(2):
                together = outcome(model, batch, (0, 2, LAYERS), kv_dtype)
                assert [torch.equal(a, b) for a, b in zip(together, steps, strict=True)] == [True] * len(steps)
        set_threads(1)
        assert torch.equal(outcome(model, batch, (), kv_dtype)[0], steps[0])  # all layers in one call
        assert torch.isfinite(steps[0]).all()


def test_runs_begin_where_somebody_looks() -> None:
    assert runs_of(5, ()) == [range(5)]
    assert runs_of(5, (3, 0, 5)) == [range(3), range(3, 5)]
