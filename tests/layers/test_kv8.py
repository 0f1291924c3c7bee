"""Rows of 8 bits: what is written and read back, kernel beside torch, and attention over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers import kv8
from paceline.layers.build import load_kernels
from tests.support.needs import LESSER_BUILDS, needs_kernels

HEADS, DIM, PAGE, PAGES = 2, 32, 8, 20
DTYPES = [torch.bfloat16, torch.float32]

pytestmark = needs_kernels


def random_rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values; rows of unlike sizes, a row of zeros, and one whose codes lie between two."""
    sizes = 10.0 ** torch.randint(-6, 5, (2, count, HEADS, 1))
    sizes[:, -5:] = 1e-36  # scales on both sides of the least normal number
    rows = torch.randn(2, count, HEADS, DIM) * sizes
    rows[0, 0, 0] = 0
    rows[1, 1, 1] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0] * (DIM // 8))
    return rows.to(dtype)


def numbers(pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values at ``slots``, [2, n, Hk, D] of ``dtype``."""
    rows = pages[slots // pages.shape[2], :, slots % pages.shape[2]]
    return kv8.unrounded_rows(rows.transpose(0, 1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_and_read_what_torch_does(dtype: torch.dtype) -> None:
    rows, slots = random_rows(50, dtype), torch.randperm(PAGES * PAGE)[:50]
    pages, expected = (torch.zeros(PAGES, 2, PAGE, HEADS, DIM + 4, dtype=torch.int8) for _ in range(2))
    kv8.write_rows(rows, slots, pages)
    kv8.write_rows_reference(rows, slots, expected)
    assert torch.equal(pages, expected)
    read = numbers(pages, slots, dtype)
    far = (read.float() - rows.float()).abs()
    largest = rows.float().abs().amax(dim=-1, keepdim=True)
    rounding = 2**-8 if dtype is torch.bfloat16 else 2**-20
    assert (far <= largest * (0.5001 / 127 + rounding))[:, :-5].all()  # half a step of its own head and token


def test_codes_by_the_definition() -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0])
    kept = kv8.round_rows(row)
    assert kept[:8].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]  # to nearest even
    assert kept[8:].view(torch.float32).item() == 1.0
    assert kv8.round_rows(torch.zeros(8)).tolist() == [0] * 12
    assert kv8.round_rows(torch.full((8,), 1e-36)).tolist() == [0] * 12  # its scale would be subnormal
    assert kv8.round_rows(torch.full((8,), 2e-36)).tolist()[:8] == [127] * 8


GEOMETRIES = [(9, 3, 64), (4, 2, 16), (20, 1, 32), (2, 2, 128)]  # query heads, KV heads, dim
BUILDS = [(), *LESSER_BUILDS]
LENGTH, COPIES = 320, 3  # positions of a sequence; each has three places of its own
PARENTS = [-1, 0, 0, 1, 3, 3, 2, 4]


def rows_of(count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values whose heads have unlike scales. The scales of the last third's values are next to subnormal."""
    generator = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-2, 3, (2, count, heads, 1), generator=generator)
    sizes[1, -count // COPIES :] *= 1e-36
    return (torch.randn(2, count, heads, dim, generator=generator) * sizes).to(dtype)


class Case:
    """The same rows twice: as codes in pages of one size, and as the numbers that they mean in pages of another."""

    def __init__(
        self, geometry: tuple[int, int, int], dtype: torch.dtype, page_sizes: tuple[int, int], length: int = LENGTH
    ) -> None:
        heads, kv_heads, dim = geometry
        self.length, count, layer = length, length * COPIES, KvLayer(LayerKind.GQA, LayerOwner.TARGET, kv_heads, dim)
        self.pools, self.slots = list[KvPool](), list[torch.Tensor]()
        rows = rows_of(count, kv_heads, dim, dtype)
        numbers = kv8.unrounded_rows(kv8.round_rows(rows), dtype)
        for page, kv_dtype in zip(page_sizes, ("int8", "auto"), strict=True):
            pool = KvPool(KvLayout.of([layer], dtype, kv_dtype), -(-count // page), page)
            places = torch.randperm(pool.num_pages)[:, None] * page + torch.arange(page)
            slots = places.flatten()[:count]
            if pool.layout.is_int8:
                kv8.write_rows(rows, slots, pool.data[0])
            else:
                pool.data[0][slots // page, :, slots % page] = numbers.transpose(0, 1)
            self.pools.append(pool)
            self.slots.append(slots.to(torch.int32))
        self.query = torch.randn(200, heads, dim, generator=torch.Generator().manual_seed(4)).to(dtype)
        self.sinks = torch.randn(heads)

    def attend(self, which: int, make: Callable[[list[torch.Tensor]], list[Segment]], window: int) -> torch.Tensor:
        sequences = list(torch.split(self.slots[which], self.length))
        batch, backend = ForwardBatch.build(make(sequences)), CpuAttention()
        sinks = self.sinks if window == 40 else None
        plan = backend.plan(batch)
        return backend.attend(self.query[: batch.num_rows], self.pools[which], 0, plan, 0.2, window, sinks)


def chunk(start: int, rows: int) -> Callable[[list[torch.Tensor]], list[Segment]]:
    return lambda slots: [Segment.linear([0] * rows, start, slots[0])]


def trees(*starts: int) -> Callable[[list[torch.Tensor]], list[Segment]]:
    return lambda slots: [
        Segment.tree([0] * len(PARENTS), PARENTS, at, own) for at, own in zip(starts, slots, strict=False)
    ]


def mixed(slots: list[torch.Tensor]) -> list[Segment]:
    """A row, neighbours and a tree, of three sequences."""
    tree = Segment.tree([0] * len(PARENTS), PARENTS, 127, slots[2])
    return [Segment.linear([0], 300, slots[0]), Segment.linear([0] * 4, 126, slots[2]), tree]


BATCHES = {
    "a first row": chunk(0, 1),
    "a row at a tile's end": chunk(127, 1),
    "a row": chunk(299, 1),
    "four rows": chunk(254, 4),
    "a chunk": chunk(100, 140),
    "a prompt": chunk(0, 37),
    "trees": trees(0, 122, 250),
    "trees of other lengths": trees(128, 127, 31),
    "mixed": mixed,
}


@pytest.mark.parametrize("build", BUILDS, ids=lambda flags: "".join(flags) or "host")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_over_codes_has_the_bits_of_attention_over_their_numbers(
    geometry: tuple[int, int, int], dtype: torch.dtype, build: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: the scale of the neighbouring head; a tile's last rows are left out; a window one position further;
    values that are not rounded after their scale; a tail that is read from the prefix."""
    library = load_kernels(build)
    monkeypatch.setattr("paceline.attention.cpu.load_kernels", lambda: library)
    for page_sizes in ((16, 5), (1, 64)):
        case = Case(geometry, dtype, page_sizes)
        for name, batch in BATCHES.items():
            for window in (0, 7, 40, 130):
                found, expected = (case.attend(which, batch, window) for which in (0, 1))
                assert torch.equal(found, expected), (name, window, page_sizes)
                assert found.isfinite().all()


LONG = {
    "a row": chunk(1090, 1),
    "a row at a part's end": chunk(1023, 1),
    "a chunk": chunk(500, 40),
    "trees": trees(508, 1020, 700),
}


@pytest.mark.parametrize("build", BUILDS, ids=lambda flags: "".join(flags) or "host")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_parts(dtype: torch.dtype, build: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where threads share the parts. Mutant: a tail that is read from the prefix."""
    library = load_kernels(build)
    assert library is not None
    monkeypatch.setattr("paceline.attention.cpu.load_kernels", lambda: library)
    case = Case(GEOMETRIES[0], dtype, (16, 5), 1100)
    for name, batch in LONG.items():
        for window in (0, 40, 600):
            expected = case.attend(1, batch, window)
            for threads in (1, 3):
                library.pl_set_threads(threads)
                found = case.attend(0, batch, window)
                library.pl_set_threads(1)
                assert torch.equal(found, expected), (name, window, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_the_same_numbers(dtype: torch.dtype) -> None:
    """The reference over codes, beside itself over their numbers, and beside the kernels."""
    case, backend, found = Case(GEOMETRIES[0], dtype, (16, 5)), TorchAttention(), list[torch.Tensor]()
    for window in (0, 40):
        for pool, slots in zip(case.pools, case.slots, strict=True):
            batch = ForwardBatch.build(chunk(100, 140)(list(torch.split(slots, LENGTH))))
            plan, sinks = backend.plan(batch), case.sinks if window else None
            found.append(backend.attend(case.query[: batch.num_rows], pool, 0, plan, 0.2, window, sinks))
        assert torch.equal(*found)
        rounding = 1.6e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(case.attend(0, chunk(100, 140), window), found[0], rtol=rounding, atol=rounding)
        found.clear()
