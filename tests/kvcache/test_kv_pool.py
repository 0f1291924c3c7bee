"""KvPool: what is written is read, and canonical order is the same whatever the page size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from tests.support.pool_rows import write_rows

torch.set_num_threads(1)

GQA = KvLayer(LayerKind.GQA, LayerOwner.TARGET, num_kv_heads=3, head_dim=4)
GQA_DRAFT = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, num_kv_heads=1, head_dim=8)
MLA = KvLayer(LayerKind.MLA, LayerOwner.TARGET, num_kv_heads=1, head_dim=10)
LAYERS = {
    "gqa": (GQA, GQA, GQA_DRAFT),
    "mla": (MLA, MLA),
    "mixed": (MLA, GQA, MLA, GQA_DRAFT),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def make_pool(name: str, page_size: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> KvPool:
    return KvPool(KvLayout(LAYERS[name], dtype), num_pages=256 // page_size, page_size=page_size, device=device)


def random_slots(pool: KvPool, num_tokens: int, seed: int) -> torch.Tensor:
    """Distinct slots in no order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(pool.num_pages * pool.page_size, generator=generator)[:num_tokens]


def fill(pool: KvPool, slots: torch.Tensor, seed: int) -> list[list[torch.Tensor]]:
    """Write random tokens; returns per layer [key, value] or [rows]."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for i, layer in enumerate(pool.layout.layers):
        shape: tuple[int, ...] = (len(slots), layer.head_dim)
        if layer.kind is LayerKind.GQA:
            shape = (len(slots), layer.num_kv_heads, layer.head_dim)
        count = 2 if layer.kind is LayerKind.GQA else 1
        parts = [torch.randn(shape, generator=generator).to(pool.device, pool.layout.dtype) for _ in range(count)]
        write_rows(pool, i, slots, *parts)
        written.append(parts)
    return written


def canonical(written: list[list[torch.Tensor]], layers: range) -> torch.Tensor:
    """Slow reference of gather: layer, token, K heads, V heads."""
    pieces = []
    for layer in layers:
        for token in range(written[layer][0].shape[0]):
            pieces += [part[token].reshape(-1) for part in written[layer]]
    return torch.cat(pieces)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_read_gives_what_write_stored(name: str, device: str, slot_dtype: torch.dtype) -> None:
    pool = make_pool(name, 16, device)
    slots = random_slots(pool, 50, seed=1).to(slot_dtype)
    written = fill(pool, slots, seed=2)
    for i, parts in enumerate(written):
        read = pool.read(i, slots) if len(parts) == 2 else (pool.read_latent(i, slots),)
        assert all(torch.equal(a, b) for a, b in zip(read, parts, strict=True))


def test_a_slot_is_page_times_page_size_plus_offset() -> None:
    pool = make_pool("mixed", 4)
    slots = torch.tensor([4 * 5 + 2])
    (rows,), (key, value), *_ = fill(pool, slots, seed=3)
    assert pool.data[0].shape == (64, 4, 10)
    assert pool.data[1].shape == (64, 2, 4, 3, 4)
    assert torch.equal(pool.data[0][5, 2], rows[0])
    assert torch.equal(pool.data[1][5, 0, 2], key[0])
    assert torch.equal(pool.data[1][5, 1, 2], value[0])
    assert int(pool.data[1].count_nonzero()) == 2 * 3 * 4  # nothing else was touched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("source_page", "dest_page"), [(16, 64), (64, 16), (1, 8), (8, 8)])
def test_gather_and_scatter_know_no_page_size(name: str, device: str, source_page: int, dest_page: int) -> None:
    source, dest = make_pool(name, source_page, device), make_pool(name, dest_page, device)
    slots, dest_slots = random_slots(source, 70, seed=4), random_slots(dest, 70, seed=5)
    written = fill(source, slots, seed=6)
    layers = range(len(written))
    data = source.gather(layers, slots)
    assert torch.equal(data, canonical(written, layers))
    dest.scatter(layers, dest_slots, data)
    assert torch.equal(dest.gather(layers, dest_slots), data)
    for before, after in zip(source.data, dest.data, strict=True):
        assert before.count_nonzero() == after.count_nonzero()


@pytest.mark.parametrize("layers", [range(0, 2), range(1, 4), range(3, 4), range(0)])
def test_gather_and_scatter_of_some_layers(layers: range) -> None:
    source, dest = make_pool("mixed", 16), make_pool("mixed", 4)
    slots = random_slots(source, 9, seed=7)
    written = fill(source, slots, seed=8)
    data = source.gather(layers, slots)
    expected = canonical(written, layers) if layers else torch.empty(0, dtype=torch.bfloat16)
    assert torch.equal(data, expected)
    dest.scatter(layers, slots, data)
    touched = [i for i, layer in enumerate(dest.data) if layer.count_nonzero()]
    assert touched == list(layers)


def test_layer_groups_join_to_the_whole() -> None:
    """A hand-off sends layer groups one by one; together they are what one gather gives."""
    pool = make_pool("mixed", 16)
    slots = random_slots(pool, 20, seed=9)
    fill(pool, slots, seed=10)
    parts = [pool.gather(group, slots) for group in (range(0, 1), range(1, 3), range(3, 4))]
    assert torch.equal(torch.cat(parts), pool.gather(range(4), slots))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("source", "dest"),
    [
        ([5, 7, 8, 11], [4, 5, 6, 7]),  # compaction of an accepted path (algorithms.md D6)
        ([3, 4, 5], [4, 5, 6]),  # the other way: an in-order copy would smear slot 3
        ([1, 2], [2, 1]),
        ([], []),
    ],
)
def test_copy_slots_reads_before_it_writes(name: str, source: list[int], dest: list[int]) -> None:
    pool = make_pool(name, 4)
    everything = torch.arange(256)
    fill(pool, everything, seed=11)
    layers = range(len(pool.data))
    before = [pool.gather(range(i, i + 1), everything).view(256, -1) for i in layers]
    pool.copy_slots(layers, torch.tensor(source, dtype=torch.int64), torch.tensor(dest, dtype=torch.int64))
    for i in layers:
        expected = before[i].clone()
        expected[dest] = before[i][source]
        assert torch.equal(pool.gather(range(i, i + 1), everything).view(256, -1), expected)


def test_copy_slots_leaves_other_layers_alone() -> None:
    pool = make_pool("mixed", 4)
    everything = torch.arange(256)
    fill(pool, everything, seed=12)
    before = [data.clone() for data in pool.data]
    pool.copy_slots(range(1, 3), torch.tensor([9]), torch.tensor([2]))
    changed = [i for i, data in enumerate(pool.data) if not torch.equal(data, before[i])]
    assert changed == [1, 2]


def test_no_tokens_is_a_no_op() -> None:
    pool = make_pool("mixed", 4)
    none = torch.empty(0, dtype=torch.int64)
    fill(pool, none, seed=13)
    data = pool.gather(range(4), none)
    pool.scatter(range(4), none, data)
    assert data.shape == (0,)
    assert not any(int(data.count_nonzero()) for data in pool.data)


def test_bad_calls_name_what_is_wrong() -> None:
    pool = make_pool("mixed", 16)  # layer 0 MLA of 10, layer 1 GQA of 3 x 4
    slots = torch.tensor([1, 2])
    key = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    row = torch.cat((key.view(-1), key.view(-1)))
    bad_calls: dict[str, Callable[[], object]] = {
        "layer 0 is mla": lambda: pool.read(0, slots),
        "layer 1 is gqa": lambda: pool.read_latent(1, slots),
        "layer 4 is outside": lambda: pool.read(4, slots),
        "are outside a pool of 4": lambda: pool.gather(range(3, 5), slots),
        "data for 2 tokens of layers .*: shape": lambda: pool.scatter(range(1, 2), slots, key.view(-1)),
        "data for 2 tokens of layers .*: dtype": lambda: pool.scatter(range(1, 2), slots, row.float()),
        "slots must be": lambda: pool.read(1, slots.float()),
        "2 source slots but 1": lambda: pool.copy_slots(range(4), slots, slots[:1]),
    }
    for message, call in bad_calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    for slot in (256, -1):
        with pytest.raises(IndexError):
            pool.gather(range(4), torch.tensor([slot]))
        with pytest.raises(IndexError):
            pool.scatter(range(1, 2), torch.tensor([slot]), row[:24])
    assert not any(int(data.count_nonzero()) for data in pool.data)


def test_bad_sizes_are_refused() -> None:
    layout = KvLayout(LAYERS["gqa"], torch.bfloat16)
    for num_pages, page_size in ((0, 16), (4, 0), (2**27, 32)):
        with pytest.raises(ValueError, match=str(num_pages)):
            KvPool(layout, num_pages, page_size)


UNTOUCHED = """
import psutil, torch
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
layout = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, 8, 128),), torch.bfloat16)
before = psutil.Process().memory_info().rss
pool = KvPool(layout, num_pages=8192, page_size=16)
print(pool.data[0].nbytes, psutil.Process().memory_info().rss - before)
"""


def test_untouched_pages_cost_no_memory() -> None:
    """In a process of its own: other tests' threads and memory would be counted here."""
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=60, check=True)
    size, grown = map(int, done.stdout.split())
    assert size == 2**29
    assert grown < 2**26


def test_pages_are_aligned_zeros() -> None:
    pool = KvPool(KvLayout((GQA,), torch.bfloat16), num_pages=8, page_size=16)
    assert pool.data[0].data_ptr() % 64 == 0
    assert not int(pool.data[0].count_nonzero())
