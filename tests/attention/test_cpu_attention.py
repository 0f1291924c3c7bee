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
from paceline.layers.build import set_threads
from tests.support.needs import needs_kernels
from tests.support.pool_rows import write_rows
from tests.support.tolerance import Tolerance

pytestmark = needs_kernels

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
        write_rows(self.kv, 0, self.slots[:LENGTH].long(), self.k, self.v)

    def attend(self, backend: CpuAttention | TorchAttention, start: int, end: int) -> torch.Tensor:
        batch = ForwardBatch.build([Segment.linear([0] * (end - start), start, self.slots)])
        return backend.attend(self.q[start:end], self.kv, 0, backend.plan(batch), self.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_reference(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    case = Case(dtype, geometry, 16)
    got, expected = case.attend(CpuAttention(), 0, LENGTH), case.attend(TorchAttention(), 0, LENGTH)
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 4e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
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


PARENTS = [-1, 0, 0, 1, 1, 2, 3]
STARTS = (0, 1, 31, 32, 97, 121, 125, 127, 128, 200, 250)  # in and at the end of a tile, and of a block of 32 keys


def random_tree(num_nodes: int) -> list[int]:
    """Parents of a tree that is eight deep where it grew deepest, more nodes than share one run."""
    generator = torch.Generator().manual_seed(num_nodes)
    parents, depths = [-1], [1]
    while len(parents) < num_nodes:
        parent = len(parents) - 1  # a path goes on
        if len(parents) % 3 == 0 or depths[parent] == 8:
            parent = int(torch.randint(len(parents), (1,), generator=generator))
        if depths[parent] < 8:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_tree_rows_equal_the_same_rows_decoded_plainly(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    """J5: each node of a tree against its path alone, in the positions the path would occupy."""
    for start in STARTS:
        for parents in (PARENTS, random_tree(45)):
            case, num = Case(dtype, geometry, 16), len(parents)
            batch = ForwardBatch.build([Segment.tree([0] * num, parents, start, case.slots)])
            write_rows(case.kv, 0, batch.write_slots, case.k[:num], case.v[:num])
            backend, query = CpuAttention(), case.q[:num]
            tree = backend.attend(query, case.kv, 0, backend.plan(batch), case.scale)
            for node in range(num):
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                assert torch.equal(tree[node], plain_path(case, geometry, start, path, query)), (start, num, node)


def plain_path(
    case: Case, geometry: tuple[int, int, int], start: int, path: Sequence[int], query: torch.Tensor
) -> torch.Tensor:
    """The last row of ``path``, decoded without a tree into slots of its own; the prefix's rows stand there."""
    own = case.slots.clone()
    own[start : start + len(path)] = case.slots[LENGTH : LENGTH + len(path)]
    rows = list(path)
    batch = ForwardBatch.build([Segment.linear([0] * len(path), start, own)])
    write_rows(case.kv, 0, batch.write_slots, case.k[rows], case.v[rows])
    backend = CpuAttention()
    return backend.attend(query[rows], case.kv, 0, backend.plan(batch), case.scale)[-1]


def test_trees_beside_others_and_on_more_threads() -> None:
    """Trees of two sequences whose prefixes end in one tile, and rows without tails, before and behind one another."""
    case, num = Case(torch.bfloat16, (9, 3, 64), 16), len(PARENTS)
    tables = [case.slots.clone() for _ in range(3)]
    for i, start in enumerate(starts := (199, 203, 150)):
        tables[i][start : start + num] = case.slots[LENGTH + i * num : LENGTH + (i + 1) * num]
    trees = [Segment.tree([0] * num, PARENTS, starts[i], tables[i]) for i in range(2)]
    segments = [*trees, Segment.linear([0] * num, starts[2], tables[2])]
    parts = [range(i * num, (i + 1) * num) for i in range(3)]

    def attend(order: Sequence[int]) -> torch.Tensor:
        rows, backend = [row for i in order for row in parts[i]], CpuAttention()
        batch = ForwardBatch.build([segments[i] for i in order])
        write_rows(case.kv, 0, batch.write_slots, case.k[rows], case.v[rows])
        return backend.attend(case.q[rows], case.kv, 0, backend.plan(batch), case.scale)

    alone = [attend([i]) for i in range(3)]
    for threads in (1, 2):
        set_threads(threads)
        try:
            for order in ((0, 1, 2), (1, 0), (2, 1), (0, 2), (2, 0, 1)):
                assert torch.equal(attend(order), torch.cat([alone[i] for i in order])), (threads, order)
        finally:
            set_threads(1)


def test_neighbouring_rows_with_tails_may_have_other_prefixes() -> None:
    case = Case(torch.bfloat16, (9, 3, 64), 16)
    lengths, tails = [200, 201, 140, 150], [[int(case.slots[LENGTH + i])] for i in range(3)] + [[]]
    own = [*(tail[0] for tail in tails[:3]), int(case.slots[149])]
    whole = Segment([0] * 4, [200, 201, 140, 149], own, case.slots, lengths, tails)
    singly = [
        Segment([0], [whole.positions[i]], [own[i]], case.slots, [lengths[i]], [tails[i]] if tails[i] else ())
        for i in range(4)
    ]
    for i, slot in enumerate(own):
        write_rows(case.kv, 0, torch.tensor([slot]), case.k[i : i + 1], case.v[i : i + 1])
    backend = CpuAttention()
    together = backend.attend(case.q[:4], case.kv, 0, backend.plan(ForwardBatch.build([whole])), case.scale)
    for i, segment in enumerate(singly):
        plan = backend.plan(ForwardBatch.build([segment]))
        assert torch.equal(together[i], backend.attend(case.q[i : i + 1], case.kv, 0, plan, case.scale)[0]), i


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
    """The mutant that docs/internals/exactness.md names: torch's SDPA depends on the number of query rows."""
    case = Case(torch.bfloat16, (9, 3, 64), 16)

    def sdpa(start: int, end: int) -> torch.Tensor:
        query, keys, values = (t.transpose(0, 1)[None] for t in (case.q[start:end], case.k[:end], case.v[:end]))
        mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    whole = sdpa(0, LENGTH)
    assert any(not torch.equal(sdpa(s, s + 1)[0], whole[s]) for s in range(0, LENGTH, 7))
