"""The latent attention kernel against the torch reference, and its row invariance with the mutants that must fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention, RowPlan
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.build import set_threads
from tests.support.needs import LESSER_BUILDS, lesser_kernels, needs_kernels
from tests.support.pool_rows import write_rows
from tests.support.tolerance import Tolerance

pytestmark = needs_kernels

GEOMETRIES = [(8, 576, 512), (5, 64, 48), (1, 32, 16), (6, 90, 70)]  # heads, latent, value; the last fits no vector
DTYPES = [torch.bfloat16, torch.float32]
LENGTH = 300  # two whole tiles of 128 and a part
ATTEND = Callable[[int, int], torch.Tensor]


class Case:
    """Random latents and queries of one sequence, scattered over a pool's pages."""

    def __init__(self, dtype: torch.dtype, geometry: tuple[int, int, int] = GEOMETRIES[1], page_size: int = 16) -> None:
        heads, dim, self.value_dim = geometry
        generator = torch.Generator().manual_seed(7)
        self.q = torch.randn(LENGTH, heads, dim, generator=generator).to(dtype)
        self.latent = torch.randn(LENGTH, dim, generator=generator).to(dtype)
        self.scale = dim**-0.5
        layout = KvLayout((KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, dim),), dtype)
        num_pages = 2048 // page_size
        self.kv = KvPool(layout, num_pages, page_size)
        pages = torch.randperm(num_pages, generator=generator)[: -(-(LENGTH + 64) // page_size)]
        self.slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten().to(torch.int32)
        write_rows(self.kv, 0, self.slots[:LENGTH].long(), self.latent)

    def attend(self, backend: AttentionBackend, start: int, end: int) -> torch.Tensor:
        return self.run(backend, [Segment.linear([0] * (end - start), start, self.slots)], self.q[start:end])

    def run(self, backend: AttentionBackend, segments: list[Segment], query: torch.Tensor) -> torch.Tensor:
        plan = backend.plan(ForwardBatch.build(segments))
        return backend.attend_latent(query, self.kv, 0, plan, self.scale, self.value_dim)


def invariant(attend: ATTEND, whole: torch.Tensor) -> bool:
    """Whether rows attended in parts have the bits of the rows attended at once."""
    for step in (1, 5, 33):
        parts = torch.cat([attend(start, min(start + step, LENGTH)) for start in range(0, LENGTH, step)])
        if not torch.equal(parts, whole):
            return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_reference(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    case = Case(dtype, geometry)
    got, expected = case.attend(CpuAttention(), 0, LENGTH), case.attend(TorchAttention(), 0, LENGTH)
    assert got.shape == (LENGTH, geometry[0], geometry[2])
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 4e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **limits)


def test_equals_plain_attention() -> None:
    """The reference itself, against torch's attention with one KV head."""
    case = Case(torch.float32)
    query, key = case.q.transpose(0, 1)[None], case.latent[None, None].expand(1, case.q.shape[1], -1, -1)
    value = key[..., : case.value_dim]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=case.scale)[0].transpose(0, 1)
    torch.testing.assert_close(case.attend(TorchAttention(), 0, LENGTH), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_bits_do_not_depend_on_chunks_or_pages(dtype: torch.dtype, geometry: tuple[int, int, int]) -> None:
    backend = CpuAttention()
    whole = Case(dtype, geometry).attend(backend, 0, LENGTH)
    for page_size in (16, 64):
        case = Case(dtype, geometry, page_size)
        assert invariant(partial(case.attend, backend), whole), page_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    backend, case = CpuAttention(), Case(dtype, GEOMETRIES[0])
    one = case.attend(backend, 0, LENGTH)
    set_threads(2)
    try:
        assert torch.equal(case.attend(backend, 0, LENGTH), one)
        assert torch.equal(case.attend(backend, 299, 300), one[299:])
    finally:
        set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_in_a_batch_change_nothing(dtype: torch.dtype) -> None:
    backend, case = CpuAttention(), Case(dtype)
    alone = case.attend(backend, 250, 253)
    segments = [Segment.linear([0] * n, s, case.slots) for s, n in ((0, 40), (250, 3), (120, 9))]
    together = case.run(backend, segments, torch.cat((case.q[:40], case.q[250:253], case.q[120:129])))
    assert torch.equal(together[40:43], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_rows_equal_the_same_rows_decoded_plainly(dtype: torch.dtype) -> None:
    """J5: each node of a tree against its path alone, in the positions the path would occupy."""
    backend, case = CpuAttention(), Case(dtype)
    start, parents = 253, [-1, 0, 0, 1, 1, 2, 3]  # the tree's rows lie across a tile's border
    num = len(parents)
    segment = Segment.tree([0] * num, parents, start, case.slots)
    write_rows(case.kv, 0, torch.tensor(segment.write_slots), case.latent[:num])
    tree = case.run(backend, [segment], case.q[:num])
    for node in range(num):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        plain = Case(dtype, page_size=64)
        line = Segment.linear([0] * len(path), start, plain.slots)
        write_rows(plain.kv, 0, torch.tensor(line.write_slots), case.latent[path])
        assert torch.equal(tree[node], plain.run(backend, [line], case.q[path])[-1]), node


def test_a_sibling_is_not_seen() -> None:
    """Mutant: a tree read as a chain (every row sees all rows before it) gives other results."""
    backend, case = CpuAttention(), Case(torch.float32)
    tree = case.run(backend, [Segment.tree([0] * 3, [-1, 0, 0], 100, case.slots)], case.q[:3])
    chain = case.run(backend, [Segment.linear([0] * 3, 100, case.slots)], case.q[:3])
    assert torch.equal(tree[:2], chain[:2])
    assert not torch.equal(tree[2], chain[2])


def test_sdpa_in_place_of_the_kernel_fails_the_invariance_check() -> None:
    """The mutant that docs/internals/exactness.md names: torch's SDPA depends on the number of query rows."""
    case = Case(torch.bfloat16, GEOMETRIES[0])

    def sdpa(start: int, end: int) -> torch.Tensor:
        query = case.q[start:end].transpose(0, 1)[None]
        key = case.latent[None, None, :end].expand(1, query.shape[1], -1, -1)
        mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        value = key[..., : case.value_dim]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=case.scale)
        return out[0].transpose(0, 1)

    assert not invariant(sdpa, sdpa(0, LENGTH))


class ShiftedTiles(CpuAttention):
    """Mutant: tiles counted from the first row of the batch, as split-KV kernels do, in place of from position 0."""

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        assert isinstance(plan, RowPlan)
        rows = []
        for r in range(query.shape[0]):
            start = int(plan.slot_offsets[r])
            slots = plan.slots[start : start + int(plan.prefix_lens[r])].long()
            latent, border = kv.read_latent(layer, slots).float(), len(slots) - r
            scores = torch.einsum("hd,nd->hn", query[r].float(), latent) * scale
            total = torch.zeros(query.shape[1], value_dim)
            weight = torch.zeros(query.shape[1], 1)
            for part in (slice(0, border), slice(border, None)):
                exps = (scores[:, part] - scores.amax(dim=1, keepdim=True)).exp()
                total, weight = total + exps @ latent[part, :value_dim], weight + exps.sum(dim=1, keepdim=True)
            rows.append(total / weight)
        return torch.stack(rows).to(query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_move_with_the_batch_fail_the_invariance_check(dtype: torch.dtype) -> None:
    backend, case = ShiftedTiles(), Case(dtype)
    whole = case.attend(backend, 0, LENGTH)
    torch.testing.assert_close(whole, case.attend(TorchAttention(), 0, LENGTH), rtol=1.6e-2, atol=4e-3)
    assert not invariant(lambda start, end: case.attend(backend, start, end), whole)


def test_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable path, on a host that has more: invariant too, and close to the reference."""
    library = lesser_kernels(LESSER_BUILDS[0])
    assert library is not None
    monkeypatch.setattr("paceline.attention.cpu.load_kernels", lambda: library)
    for dtype in DTYPES:
        backend, case = CpuAttention(), Case(dtype)
        whole = case.attend(backend, 0, LENGTH)
        assert invariant(partial(case.attend, backend), whole)
        torch.testing.assert_close(whole, case.attend(TorchAttention(), 0, LENGTH), rtol=1.6e-2, atol=4e-3)


def test_a_backend_without_latent_attention_says_so() -> None:
    case = Case(torch.float32)
    plan = TorchAttention().plan(ForwardBatch.build([Segment.linear([0], 0, case.slots)]))
    with pytest.raises(ValueError, match="no latent attention"):
        AttentionBackend.attend_latent(TorchAttention(), case.q[:1], case.kv, 0, plan, 1.0, 16)
