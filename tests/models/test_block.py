"""A decoder layer in one call of the kernels gives the bits of its steps one by one: rows, residual stream and KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.build import set_threads
from paceline.layers.linear import Linear
from paceline.layers.rotary import rope_table
from paceline.models.base import ForwardContext
from paceline.models.block import Block, BlockWeights
from paceline.models.layer_run import LayerRun
from tests.support.needs import needs_kernels
from tests.support.quantized_weights import KINDS

pytestmark = needs_kernels

PAGE, PAGES = 16, 32
SLOTS = torch.randperm(PAGE * PAGES, generator=torch.Generator().manual_seed(3)).to(torch.int32)
TREE = [-1, 0, 0, 1, 1, 2, 5]


@dataclass(frozen=True)
class Shape:
    """Geometry of a block; ``width``: of the rows that attention reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    width: int
    inter: int
    qk_norm: bool = False
    bias: bool = False
    rms_norm_eps: float = 1e-5
    kind: str = "dense"  # of weights
    window: int = 0
    slabs: int = 1  # of the projection back and of the MLP's second matrix


SHAPES = {
    "SmolLM2": Shape(9, 3, 64, 576, 576, 1536),
    "slabs": Shape(4, 2, 64, 96, 96, 256, slabs=4),
    "EAGLE-3": Shape(4, 2, 32, 64, 128, 96),
    "Qwen3": Shape(4, 2, 64, 96, 96, 160, qk_norm=True),
    "a window": Shape(4, 2, 32, 64, 64, 96, window=33),
    "biases": Shape(4, 4, 16, 72, 72, 40, bias=True),  # sizes that are no multiples of a tile
    "8 bits": Shape(4, 2, 32, 96, 96, 160, kind="w8a8"),
    "4 bits": Shape(4, 4, 16, 72, 72, 40, bias=True, kind="w4a8"),
    "4 bits as floats": Shape(4, 2, 64, 96, 96, 160, qk_norm=True, kind="w4a16"),
}
BATCHES: dict[str, Callable[[], list[Segment]]] = {
    "a row": lambda: [Segment.linear([0], 70, SLOTS)],
    "a chunk from the start": lambda: [Segment.linear([0] * 37, 0, SLOTS)],
    "rows of two requests": lambda: [
        Segment.linear([0] * 5, 40, SLOTS),
        Segment.linear([0] * 3, 130, SLOTS[200:]),
    ],
    "a tree": lambda: [Segment.tree([0] * len(TREE), TREE, 60, SLOTS)],
}


class Case:
    """A random block, its pool filled with random KV, and rows to send through."""

    def __init__(self, shape: Shape, dtype: torch.dtype, segments: list[Segment]) -> None:
        generator = torch.Generator().manual_seed(11)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def linear(out: int, width: int, slabs: int = 1) -> Linear:
            bias = random(out) if shape.bias else None
            weight = (random(out, width) * width**-0.5).to(dtype)
            return Linear(weight if shape.kind == "dense" else KINDS[shape.kind](weight), bias, slabs=slabs)

        self.shape = shape
        heads = shape.num_heads * shape.head_dim
        kv_heads = 2 * shape.num_kv_heads * shape.head_dim
        norms = [(1 + 0.1 * random(shape.head_dim)).to(dtype) for _ in range(2)] if shape.qk_norm else [None, None]
        weights = BlockWeights(
            qkv=linear(heads + kv_heads, shape.width),
            o=linear(shape.hidden, heads, shape.slabs),
            q_norm=norms[0],
            k_norm=norms[1],
            post_norm=(1 + 0.1 * random(shape.hidden)).to(dtype),
            gate_up=linear(2 * shape.inter, shape.hidden),
            down=linear(shape.hidden, shape.inter, shape.slabs),
        )
        self.block = Block(shape, weights, 0, shape.window)
        layout = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, shape.num_kv_heads, shape.head_dim),), dtype)
        self.kv = KvPool(layout, PAGES, PAGE)
        self.kv.data[0].copy_(random(*self.kv.data[0].shape))
        self.table = rope_table(shape.head_dim, 10000.0, 512, None)
        self.input_norm = (1 + 0.1 * random(shape.hidden)).to(dtype)
        self.layer = LayerRun([(self.block, self.input_norm)])
        self.batch = ForwardBatch.build(segments)
        rows = self.batch.num_rows
        self.normed = random(rows, shape.width).to(dtype)
        self.added, self.residual = random(rows, shape.hidden).to(dtype), random(rows, shape.hidden).to(dtype)

    def run(self, *, at_once: bool, whole: bool, attention: AttentionBackend) -> list[torch.Tensor]:
        """(what the layer adds, residual stream, pool), from the same start every time."""
        start, calls = self.kv.data[0].clone(), self.block.calls
        context = ForwardContext.build(self.batch, self.kv, attention)
        residual = self.residual.clone()
        self.block.calls = calls if at_once else None
        try:
            if whole:
                out = self.layer(self.added, residual, self.table, context)
            else:
                query = self.block.write(self.normed, self.table, self.batch, self.kv)
                out = self.block.finish(query, residual, context)
            return [out, residual, self.kv.data[0].clone()]
        finally:
            self.block.calls = calls
            self.kv.data[0].copy_(start)


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[bool]:
    """Bit for bit, part by part."""
    return [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_one_call_gives_the_bits_of_the_steps(name: str, dtype: torch.dtype, batch: str) -> None:
    case = Case(SHAPES[name], dtype, BATCHES[batch]())
    assert case.block.calls is not None
    for whole in (True, False):
        if whole and case.shape.width != case.shape.hidden:
            continue  # what is normed before such a layer's attention is its head's affair
        expected = case.run(at_once=False, whole=whole, attention=CpuAttention())
        assert same(case.run(at_once=True, whole=whole, attention=CpuAttention()), expected) == [True] * 3
        assert not torch.equal(expected[1], case.residual)  # attention added something
        assert torch.isfinite(expected[0].float()).all()


def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of them outlives the call that reads it: memory that is free by then is filled with something else."""
    case = Case(SHAPES["SmolLM2"], torch.bfloat16, BATCHES["a chunk from the start"]())
    expected = case.run(at_once=True, whole=False, attention=CpuAttention())
    calls = case.block.calls
    assert calls is not None
    write, others = calls.call("write", case.kv), list[torch.Tensor]()

    of_name = calls.call

    def after_others(*arguments: int) -> None:
        others.extend(torch.full(case.normed.shape, 7.0, dtype=torch.bfloat16) for _ in range(8))
        write(*arguments)

    monkeypatch.setattr(calls, "call", lambda name, kv: after_others if name == "write" else of_name(name, kv))
    case.normed = torch.stack((case.normed, case.normed), dim=-1)[..., 0]
    assert not case.normed.is_contiguous()
    assert same(case.run(at_once=True, whole=False, attention=CpuAttention()), expected) == [True] * 3


def test_bits_do_not_depend_on_the_threads() -> None:
    case = Case(SHAPES["SmolLM2"], torch.bfloat16, BATCHES["a chunk from the start"]())
    one = case.run(at_once=True, whole=True, attention=CpuAttention())
    set_threads(2)
    try:
        assert same(case.run(at_once=True, whole=True, attention=CpuAttention()), one) == [True] * 3
    finally:
        set_threads(1)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """Two rows of one chunk alone, each after the other, as the chunk has them (docs/internals/exactness.md)."""
    case = Case(SHAPES["SmolLM2"], torch.bfloat16, [Segment.linear([0, 0], 50, SLOTS)])
    context = ForwardContext.build(case.batch, case.kv, CpuAttention())
    both = case.layer(case.added, case.residual.clone(), case.table, context)
    for row in range(2):
        context = ForwardContext.build(
            ForwardBatch.build([Segment.linear([0], 50 + row, SLOTS)]), case.kv, CpuAttention()
        )
        at = slice(row, row + 1)
        alone = case.layer(case.added[at], case.residual[at].clone(), case.table, context)
        assert torch.equal(alone, both[at])


def test_another_backend_than_the_kernels_is_asked() -> None:
    """Only what the block's own kernels do is done in one call: attention of another backend is that backend's."""
    case = Case(SHAPES["SmolLM2"], torch.float32, BATCHES["a tree"]())
    expected = case.run(at_once=False, whole=True, attention=TorchAttention())
    assert same(case.run(at_once=True, whole=True, attention=TorchAttention()), expected) == [True] * 3
    kernels = case.run(at_once=True, whole=True, attention=CpuAttention())
    torch.testing.assert_close(kernels[0], expected[0], rtol=1e-4, atol=1e-4)
    assert not torch.equal(kernels[0], expected[0])


@pytest.mark.parametrize("whole", [True, False])
def test_a_geometry_without_a_kernel_is_refused(whole: bool) -> None:
    shape = replace(SHAPES["SmolLM2"], head_dim=24, num_heads=4, num_kv_heads=2)
    case = Case(shape, torch.bfloat16, BATCHES["a row"]())
    with pytest.raises(ValueError, match="no attention kernel for 4 heads over 2 of 24"):
        case.run(at_once=True, whole=whole, attention=CpuAttention())
