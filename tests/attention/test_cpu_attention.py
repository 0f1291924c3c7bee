"""The CPU attention kernel against the torch reference, and its row invariance with the mutants that must fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.build import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler: the kernels cannot be built")

GEOMETRIES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (4, 2, 16), (6, 2, 96)]
DTYPES = [torch.bfloat16, torch.float32]
LENGTH = 300  # two whole tiles of 128 and a part


class Case:
    """Random keys, values and queries of one sequence, scattered over a pool's pages."""

    def __init__(self, dtype: torch.dtype, geometry: tuple[int, int, int], page_size: int) -> None:
        heads, kv_heads, dim = geometry
        generator = torch.Generator().manual_seed(7)
        self.q, self.k, self.v = (
            torch.randn(LENGTH, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
        )
        self.scale = dim**-0.5
        layout = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, kv_heads, dim),), dtype)
        num_pages = 2048 // page_size
        self.kv = KvPool(layout, num_pages, page_size)
        pages = torch.randperm(num_pages, generator=generator)[: -(-(LENGTH + 64) // page_size)]
        self.slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten().to(torch.int32)
        self.kv.write(0, self.slots[:LENGTH].long(), self.k, self.v)

    def attend(self, backend: CpuAttention | TorchAttention, start: int, end: int) -> torch.Tensor:
        batch = ForwardBatch.build([Segment.linear([0] * (end - start), start, self.slots)])
        return backend.attend(self.q[start:end], self.kv, 0, backend.plan(batch), self.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_reference(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    case = Case(dtype, geometry, 16)
    got, expected = case.attend(CpuAttention(), 0, LENGTH), case.attend(TorchAttention(), 0, LENGTH)
    limits = {"rtol": 1.6e-2, "atol": 4e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **limits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_bits_do_not_depend_on_chunks_or_pages(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    backend = CpuAttention()
    whole = Case(dtype, geometry, 16).attend(backend, 0, LENGTH)
    for page_size in (1, 16, 64):
        case = Case(dtype, geometry, page_size)
        for step in (1, 5, 33, LENGTH):
            parts = [case.attend(backend, s, min(s + step, LENGTH)) for s in range(0, LENGTH, step)]
            assert torch.equal(torch.cat(parts), whole), (page_size, step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_rows_equal_the_same_rows_decoded_plainly(dtype: torch.dtype) -> None:
    """J5: each node of a tree against its path alone, in the positions the path would occupy."""
    backend, case = CpuAttention(), Case(dtype, (9, 3, 64), 16)
    start, parents = 200, [-1, 0, 0, 1, 1, 2, 3]
    num = len(parents)
    batch = ForwardBatch.build([Segment.tree([0] * num, parents, start, case.slots)])
    case.kv.write(0, batch.write_slots, case.k[:num], case.v[:num])
    query = case.q[:num]
    tree = backend.attend(query, case.kv, 0, backend.plan(batch), case.scale)
    for node in range(num):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = plain_path(case, backend, start, path, query)
        assert torch.equal(tree[node], alone), node


def plain_path(case: Case, backend: CpuAttention, start: int, path: Sequence[int], query: torch.Tensor) -> torch.Tensor:
    plain = Case(query.dtype, (9, 3, 64), 16)
    batch = ForwardBatch.build([Segment.linear([0] * len(path), start, plain.slots)])
    plain.kv.write(0, batch.write_slots, case.k[list(path)], case.v[list(path)])
    rows = query[list(path)]
    return backend.attend(rows, plain.kv, 0, backend.plan(batch), plain.scale)[-1]


def test_a_sibling_is_not_seen() -> None:
    """Mutant: a tree read as a chain (every row sees all rows before it) gives other results."""
    backend, case = CpuAttention(), Case(torch.float32, (4, 4, 32), 16)
    tree = ForwardBatch.build([Segment.tree([0] * 3, [-1, 0, 0], 100, case.slots)])
    chain = ForwardBatch.build([Segment.linear([0] * 3, 100, case.slots)])
    rows = [backend.attend(case.q[:3], case.kv, 0, backend.plan(b), case.scale) for b in (tree, chain)]
    assert torch.equal(rows[0][:2], rows[1][:2])
    assert not torch.equal(rows[0][2], rows[1][2])


def test_neighbours_in_a_batch_change_nothing() -> None:
    backend, case = CpuAttention(), Case(torch.bfloat16, (9, 3, 64), 16)
    alone = case.attend(backend, 250, 253)
    others = [Segment.linear([0] * n, s, case.slots) for s, n in ((0, 40), (120, 9))]
    batch = ForwardBatch.build([others[0], Segment.linear([0] * 3, 250, case.slots), others[1]])
    query = torch.cat((case.q[:40], case.q[250:253], case.q[120:129]))
    together = backend.attend(query, case.kv, 0, backend.plan(batch), case.scale)
    assert torch.equal(together[40:43], alone)


def test_sdpa_in_place_of_the_kernel_fails_the_invariance_check() -> None:
    """The mutant named by the design: torch's SDPA depends on the number of query rows."""
    case = Case(torch.bfloat16, (9, 3, 64), 16)

    def sdpa(start: int, end: int) -> torch.Tensor:
        query, keys, values = (t.transpose(0, 1)[None] for t in (case.q[start:end], case.k[:end], case.v[:end]))
        mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    whole = sdpa(0, LENGTH)
    assert any(not torch.equal(sdpa(s, s + 1)[0], whole[s]) for s in range(0, LENGTH, 7))
