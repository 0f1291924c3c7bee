"""Sliding windows and sinks: both backends against the formula, bits of the CPU kernel, and mutants that must fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment, StaticShape
from paceline.attention.cpu import CpuAttention
from paceline.attention.select import attention_for
from paceline.attention.torch_paged import DensePlan, TorchAttention
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.build import set_threads
from tests.support.needs import needs_kernels
from tests.support.pool_rows import write_rows
from tests.support.tolerance import Tolerance

pytestmark = needs_kernels

GEOMETRIES = [(9, 3, 64), (12, 1, 32), (2, 1, 256)]
WINDOWS = (1, 7, 100, 128, 130, 0)  # shorter than a tile, a tile, longer, none
LENGTH, PAGE, PAGES = 300, 16, 40  # two whole tiles of 128 and a part
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 7]


class Case:
    """Random keys, values and queries of one sequence, scattered over a pool's pages."""

    def __init__(self, dtype: torch.dtype, geometry: tuple[int, int, int], *, sinks: bool = True) -> None:
        heads, kv_heads, dim = geometry
        generator = torch.Generator().manual_seed(7)
        self.q, self.k, self.v = (
            torch.randn(LENGTH, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
        )
        self.sinks = torch.randn(heads, generator=generator) * 2 if sinks else None
        self.scale = dim**-0.5
        self.kv = KvPool(KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, kv_heads, dim),), dtype), PAGES, PAGE)
        pages = torch.randperm(PAGES, generator=generator)
        self.slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten().to(torch.int32)
        write_rows(self.kv, 0, self.slots[:LENGTH].long(), self.k, self.v)

    def attend(self, backend: AttentionBackend, start: int, end: int, window: int) -> torch.Tensor:
        batch = ForwardBatch.build([Segment.linear([0] * (end - start), start, self.slots)])
        return self.over(backend, batch, self.q[start:end], window)

    def over(self, backend: AttentionBackend, batch: ForwardBatch, query: torch.Tensor, window: int) -> torch.Tensor:
        return backend.attend(query, self.kv, 0, backend.plan(batch), self.scale, window, self.sinks)

    def formula(self, window: int, *, late_sink: bool = False) -> torch.Tensor:
        """Dense, float32. late_sink: the sink's share is taken from a softmax without it (a mutant)."""
        group = self.q.shape[1] // self.k.shape[1]
        key, value = (t.float().repeat_interleave(group, dim=1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.float(), key) * self.scale
        at = torch.arange(LENGTH)
        seen = at[None] <= at[:, None]
        if window:
            seen &= at[None] > at[:, None] - window
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
        if self.sinks is not None:
            sink = self.sinks.view(-1, 1, 1).expand(-1, LENGTH, 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
            if late_sink:
                weights = scores.softmax(-1) / (1 + sink.exp())
        return torch.einsum("hqk,khd->qhd", weights, value)


def close_to(got: torch.Tensor, expected: torch.Tensor) -> bool:
    wide = got.dtype is torch.bfloat16
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 6e-3} if wide else {"rtol": 1e-4, "atol": 1e-5}
    return torch.allclose(got.float(), expected, **limits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_both_backends_follow_the_formula(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    """Mutants: a window off by one, a sink added after the normalisation."""
    for sinks in (False, True):
        case = Case(dtype, geometry, sinks=sinks)
        for window in WINDOWS:
            expected = case.formula(window)
            got = case.attend(CpuAttention(), 0, LENGTH, window)
            assert close_to(got, expected), (sinks, window)
            assert close_to(case.attend(TorchAttention(), 100, LENGTH, window), expected[100:]), (sinks, window)
            if 0 < window < 100:
                assert not close_to(case.attend(CpuAttention(), 0, LENGTH, window + 1), expected), window
            if sinks:
                assert not close_to(got, case.formula(window, late_sink=True)), window


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_chunks_neighbours_or_threads(dtype: torch.dtype) -> None:
    backend = CpuAttention()
    for geometry, window in zip(GEOMETRIES, (130, 7, 100), strict=True):
        case = Case(dtype, geometry)
        whole = case.attend(backend, 0, LENGTH, window)
        for step in (1, 33):
            parts = [case.attend(backend, s, min(s + step, LENGTH), window) for s in range(0, LENGTH, step)]
            assert torch.equal(torch.cat(parts), whole), (geometry, step)
        others = [Segment.linear([0] * n, s, case.slots) for s, n in ((0, 40), (250, 3), (120, 9))]
        query = torch.cat((case.q[:40], case.q[250:253], case.q[120:129]))
        for threads in (1, 2):
            set_threads(threads)
            try:
                together = case.over(backend, ForwardBatch.build(others), query, window)
            finally:
                set_threads(1)
            assert torch.equal(together, torch.cat((whole[:40], whole[250:253], whole[120:129]))), geometry


def path_to(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def along(case: Case, start: int, path: Sequence[int], query: torch.Tensor, window: int) -> torch.Tensor:
    """The last row of ``path``, decoded without a tree into slots of its own behind the tree's."""
    own = case.slots.clone()
    own[start : start + len(path)] = case.slots[LENGTH : LENGTH + len(path)]
    rows = list(path)
    batch = ForwardBatch.build([Segment.linear([0] * len(path), start, own)])
    write_rows(case.kv, 0, batch.write_slots, case.k[rows], case.v[rows])
    return case.over(CpuAttention(), batch, query[rows], window)[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_nodes_position_decides_its_window(dtype: torch.dtype) -> None:
    """Every node as its path alone has it, also where the window ends inside of the tree. Mutant: windows by slot."""
    num = len(PARENTS)
    for start in (0, 3, 97, 121, 127, 128, 250):
        for window in (2, 5, 100, 129):
            case = Case(dtype, (9, 3, 64))
            batch = ForwardBatch.build([Segment.tree([0] * num, PARENTS, start, case.slots)])
            write_rows(case.kv, 0, batch.write_slots, case.k[:num], case.v[:num])
            query = case.q[:num]
            tree = case.over(CpuAttention(), batch, query, window)
            reference = case.over(TorchAttention(), batch, query, window)
            assert close_to(tree, reference.float()), (start, window)
            for node in range(num):
                assert torch.equal(tree[node], along(case, start, path_to(node), query, window)), (start, window, node)


def test_windows_by_slot_are_noticed() -> None:
    case, num, start = Case(torch.float32, (9, 3, 64)), len(PARENTS), 97
    batch = ForwardBatch.build([Segment.tree([0] * num, PARENTS, start, case.slots)])
    write_rows(case.kv, 0, batch.write_slots, case.k[:num], case.v[:num])
    backend = TorchAttention()
    plan = backend.plan(batch)
    assert isinstance(plan, DensePlan)
    by_slot = replace(plan, positions=torch.arange(plan.columns.shape[1])[None])
    good, bad = (backend.attend(case.q[:num], case.kv, 0, p, case.scale, 3, case.sinks) for p in (plan, by_slot))
    assert not close_to(bad, good)


def test_on_gpus_the_reference_serves_windows() -> None:
    """In memory that stays, as CUDA graphs need it; FlashInfer is refused by name."""
    case, num, start, window = Case(torch.float32, (9, 3, 64)), len(PARENTS), 97, 3
    tree = Segment.tree([0] * num, PARENTS, start, case.slots)
    batch = ForwardBatch.build([tree])
    write_rows(case.kv, 0, batch.write_slots, case.k[:num], case.v[:num])
    cuda = torch.device("cuda")
    backend = attention_for(cuda, 9, 3, 64, "torch", special=True)
    assert isinstance(backend, TorchAttention)
    plan = backend.static_plan(StaticShape(requests=1, rows=num, tree=True, max_len=200), case.kv)
    assert plan is not None
    plan.fill([tree])
    got = backend.attend(case.q[:num], case.kv, 0, plan, case.scale, window, case.sinks)
    assert close_to(case.over(CpuAttention(), batch, case.q[:num], window), got)
    with pytest.raises(ConfigError, match="sliding windows"):
        attention_for(cuda, 9, 3, 64, "flashinfer", special=True)
