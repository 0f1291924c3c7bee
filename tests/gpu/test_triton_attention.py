"""Attention by Triton kernels on a GPU: the reference's results, bits of a row, graphs, engines.

The bodies of bits and reference are those of tests/attention/test_triton_attention.py, at the sizes that are served.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.attention.base import ForwardBatch, StaticShape
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.torch_paged import TorchAttention
from paceline.layers.graph_capture import CudaCapture
from paceline.triton_support import has_triton
from tests.support.device_runner import WIDE, answers, device_runner, mixed_requests, texts, with_heads, write_heads
from tests.support.paged_batches import filled_pool, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
]
if has_triton():
    from paceline.attention.triton_paged import SPLIT, TritonAttention
    from tests.support.paged_bits import CLOSE, Bits, Content, Geometry, check_reference

CUDA = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
GEOMETRIES = [(9, 3, 64, 0), (32, 8, 128, 0), (4, 4, 64, 0), (8, 1, 256, 0), (20, 1, 96, 0), (16, 1, 576, 512)]
MLA = (128, 1, 576, 512)
LENGTH = 700
DRAFTERS: dict[str, dict[str, object]] = {
    "none": {"drafter": "none", "page_size": 1},
    "ngram": {"drafter": "ngram"},
    "trie static": {"drafter": "trie", "num_draft_tokens": 6, "tree": "static", "tree_nodes": 12},
    "eagle3 dynamic": {"drafter": "eagle3", "tree": "dynamic", "tree_width": 3},
}


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16])
@pytest.mark.parametrize("shape", [*GEOMETRIES, MLA])
def test_follows_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for page_size in (1, 16, 64):
        check_reference(CUDA, Geometry(*shape), dtype, page_size, seed=page_size, most=6)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [*GEOMETRIES, MLA])
def test_bits_of_a_row(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    geometry = Geometry(*shape)
    for window in (0, 300) if not geometry.value_dim else (0,):
        bits = Bits(Content.random(CUDA, geometry, dtype, LENGTH, sinks=window > 0), SPLIT, window)
        bits.check_batches()
        bits.check_trees()
        bits.check_static()
        bits.check_derived()
        bits.check_parts()
        if geometry.kv_heads > 1:
            bits.check_shards(geometry.kv_heads)


@pytest.mark.parametrize(
    ("rows", "kinds", "latent"), [(1, "d", False), (5, "cd", False), (9, "cdt", False), (9, "cdt", True)]
)
def test_captured(rows: int, kinds: str, latent: bool) -> None:
    """A graph over batch after batch, padded; the host never waits. The rows have the bits of a plain plan."""
    geometry = Geometry(16, 1, 576, 512) if latent else Geometry(9, 3, 64)
    kv = filled_pool(geometry.kind, geometry.kv_heads, geometry.dim, 16, 401, BF16, "cuda")
    backend, reference, rng = TritonAttention(), TorchAttention(), random.Random(rows)
    shape, scratch = StaticShape(6, rows, "t" in kinds, 90), Scratch(400, 16)
    plan = backend.static_plan(shape, kv)
    query = torch.zeros(shape.num_rows, geometry.heads, geometry.dim, dtype=BF16, device=CUDA)
    plan.fill(pad_segments([], shape, scratch))
    captured = CudaCapture(CUDA)(lambda: (geometry.attend(backend, query, kv, plan),))
    for _ in range(6):
        segments = random_batch(rng, 16, 400, kinds)
        query.copy_(torch.randn(query.shape))
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan.fill(pad_segments(segments, shape, scratch))
            captured.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        index = torch.from_numpy(real_rows(segments, rows)).to(CUDA)
        batch = ForwardBatch.build(segments, CUDA)
        found = captured.outputs[0][index]
        assert torch.equal(found, geometry.attend(backend, query[index], kv, backend.plan(batch)))
        expected = geometry.attend(reference, query[index], kv, reference.plan(batch))
        torch.testing.assert_close(found, expected, **CLOSE[BF16])


def test_long_contexts() -> None:
    """Splits in the grid and merged in registers give one row the same bits at thousands of positions."""
    Bits(Content.random(CUDA, Geometry(8, 2, 128), BF16, 5000), SPLIT).check_batches()


def engine(**options: Any) -> list[list[int]]:
    runner = device_runner("cuda", WIDE, "fp32", **options)
    assert runner.attention.name == options["attention"]
    return texts(answers(runner, mixed_requests()))


@pytest.mark.parametrize("case", DRAFTERS)
def test_engines_write_the_same_text(case: str, tmp_path: Path) -> None:
    """As plain decoding over the reference does, in fp32."""
    options = with_heads(DRAFTERS[case] | {"attention": "triton"}, write_heads(tmp_path, WIDE))
    assert engine(**options) == engine(attention="torch", drafter="none", cuda_graphs=False)
