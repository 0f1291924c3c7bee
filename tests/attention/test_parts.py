"""Rows longer than a part (`PART` of kernels/tile.h): a row has its bits whoever computes its parts, and the formula's
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from tests.support.needs import LESSER_BUILDS, lesser_kernels, needs_kernels
from tests.support.pool_rows import write_rows
from tests.support.tolerance import Tolerance

pytestmark = needs_kernels

LENGTH, PAGE, SPARE = 1300, 16, 16  # two parts of 512 and a piece
GEOMETRIES = [(9, 3, 64), (12, 1, 32), (2, 2, 128)]
WINDOWS = (0, 5, 100, 512, 700)
ROWS = (0, 511, 512, 513, 640, 1023, 1024, 1025, 1299)
RUNS = ((1020, 9), (3, 2), (500, 40), (1299, 1))  # where each begins, and how many rows
# For a build that is not optimised, which takes seconds for the whole prompt: rows that lie where its parts end.
NEAR_ENDS = ((0, 7), (495, 60), (633, 16), (1007, 33), (1287, 13))
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6]
BUILDS = [(), *LESSER_BUILDS]


@pytest.fixture(params=BUILDS, ids=lambda flags: "".join(flags) or "host", autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Every build of the kernels; sets its threads."""
    library = lesser_kernels(request.param)
    assert library is not None
    monkeypatch.setattr("paceline.attention.cpu.load_kernels", lambda: library)
    yield library.pl_set_threads
    library.pl_set_threads(1)


class Case:
    """Random keys, values and queries of one sequence, scattered over a pool's pages."""

    def __init__(self, dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
        heads, kv_heads, dim = geometry
        generator = torch.Generator().manual_seed(7)
        self.q, self.k, self.v = (
            torch.randn(LENGTH, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
        )
        self.sinks = torch.randn(heads, generator=generator) * 2
        pages = -(-(LENGTH + SPARE) // PAGE)
        layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, kv_heads, dim)
        self.kv = KvPool(KvLayout((layer,), dtype), pages, PAGE)
        places = torch.randperm(pages, generator=generator)[:, None] * PAGE + torch.arange(PAGE)
        self.slots = places.flatten().to(torch.int32)
        write_rows(self.kv, 0, self.slots[:LENGTH].long(), self.k, self.v)

    def over(self, backend: AttentionBackend, batch: ForwardBatch, query: torch.Tensor, window: int) -> torch.Tensor:
        sinks = self.sinks if window in (0, 700) else None
        return backend.attend(query, self.kv, 0, backend.plan(batch), self.q.shape[2] ** -0.5, window, sinks)

    def rows(self, places: Sequence[tuple[int, int]], window: int, *, torchs: bool = False) -> torch.Tensor:
        """Runs of neighbouring rows: where each begins, and how many."""
        segments = [Segment.linear([0] * count, start, self.slots) for start, count in places]
        query = torch.cat([self.q[start : start + count] for start, count in places])
        return self.over(TorchAttention() if torchs else CpuAttention(), ForwardBatch.build(segments), query, window)


@pytest.fixture
def together(request: pytest.FixtureRequest) -> Sequence[tuple[int, int]]:
    """Rows of a prompt that are computed in one batch."""
    return NEAR_ENDS if request.node.callspec.params["threads"] else ((0, LENGTH),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_several_parts(
    dtype: torch.dtype, threads: Callable[[int], None], together: Sequence[tuple[int, int]]
) -> None:
    """Mutants: sinks in every part; a row that ends with a part joins one more; weights of a part are not faded;
    threads join parts in another order."""
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 6e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for geometry in GEOMETRIES:
        case = Case(dtype, geometry)
        for window in WINDOWS:
            numbers = [row for start, rows in together for row in range(start, start + rows)]
            whole = dict(zip(numbers, case.rows(together, window), strict=True))
            expected = case.rows([(row, 1) for row in ROWS], window, torchs=True)
            torch.testing.assert_close(torch.stack([whole[row] for row in ROWS]), expected, **limits)
            for count in (1, 2, 7):
                threads(count)
                for row in ROWS:
                    assert torch.equal(case.rows([(row, 1)], window)[0], whole[row]), (geometry, window, count, row)
                beside = torch.stack([whole[start + row] for start, rows in RUNS for row in range(rows)])
                assert torch.equal(case.rows(RUNS, window), beside), (geometry, window, count)
                threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trees_across_the_end_of_a_part(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Each node as its path alone has it."""
    case, num = Case(dtype, GEOMETRIES[0]), len(PARENTS)
    for start in (505, 509, 511, 512, 600, 1020, 1023):
        for window in (0, 300, 512):
            batch = ForwardBatch.build([Segment.tree([0] * num, PARENTS, start, case.slots)])
            write_rows(case.kv, 0, batch.write_slots, case.k[:num], case.v[:num])
            trees = []
            for count in (1, 3):
                threads(count)
                trees.append(case.over(CpuAttention(), batch, case.q[:num], window))
            threads(1)
            assert torch.equal(*trees), (start, window)
            for node in range(num):
                assert torch.equal(trees[0][node], _along(case, start, node, window)), (start, window, node)


def _along(case: Case, start: int, node: int, window: int) -> torch.Tensor:
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    own = case.slots.clone()
    own[start : start + len(path)] = case.slots[LENGTH : LENGTH + len(path)]
    batch = ForwardBatch.build([Segment.linear([0] * len(path), start, own)])
    write_rows(case.kv, 0, batch.write_slots, case.k[path], case.v[path])
    return case.over(CpuAttention(), batch, case.q[path], window)[-1]
