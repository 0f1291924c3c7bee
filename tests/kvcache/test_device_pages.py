"""The page kernels against the pool's torch loops, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from paceline.kvcache.device_pages import DevicePages, make_device_pages
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from tests.support.device_pages import DTYPES, LAYERS, check_compaction, check_gather_and_scatter, random_pool
from tests.support.interpreter import INTERPRETED, Again

torch.set_num_threads(1)
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@interpreted
@pytest.mark.parametrize(
    ("name", "page_size", "dtype"),
    [*(("mixed", 8, dtype) for dtype in DTYPES), ("gqa", 1, DTYPES[0]), ("wide", 4, DTYPES[1]), ("mla", 16, DTYPES[2])],
)
def test_gather_and_scatter(name: str, page_size: int, dtype: torch.dtype) -> None:
    check_gather_and_scatter(CPU, name, page_size, dtype)


@interpreted
@pytest.mark.parametrize(("name", "page_size"), [("gqa", 1), ("wide", 4), ("mla", 16), ("mixed", 8)])
def test_compaction(name: str, page_size: int) -> None:
    check_compaction(CPU, name, page_size, torch.bfloat16)


@interpreted
def test_slots_outside_the_pool_touch_nothing() -> None:
    truth, there, kernels = random_pool("gqa", 4, torch.bfloat16, CPU)
    slots = torch.tensor([-1, 64, 2**31])
    width = sum(layer.row_elems for layer in truth.layout.layers)
    kernels.gather(range(3), slots)
    kernels.scatter(range(3), slots, torch.ones(3 * width, dtype=torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(truth.data, there.data, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "unit", "even"),
    [
        ("gqa", torch.bfloat16, 8, 2),
        ("wide", torch.float32, 8, 2),
        ("mla", torch.uint8, 8, 2),
        ("mixed", torch.bfloat16, 2, 1),
        ("mixed", torch.uint8, 1, 1),
    ],
)
def test_units_divide_every_row(name: str, dtype: torch.dtype, unit: int, even: int) -> None:
    _, _, kernels = random_pool(name, 4, dtype, CPU)
    assert (kernels.units.unit.itemsize, kernels.units.even) == (unit, even)


def test_compaction_in_torch() -> None:
    """``KvPool.keep_paths`` where no kernel runs: a path moves up, other trees stay, the root stays."""
    pool = KvPool(KvLayout(LAYERS["mla"], torch.float32), 4, 4)
    assert make_device_pages(pool._flat, pool.layout, 4) is None
    for data in pool.data:
        data.copy_(torch.arange(16.0).view(4, 4, 1).expand(data.shape))
    slots = torch.tensor([15, 3, 8, 4, 0, 1, 2], dtype=torch.int32)
    starts = torch.tensor([0, 4, 7], dtype=torch.int32)
    paths = torch.tensor([[2, 3], [9, 9]], dtype=torch.int32)
    pool.keep_paths(range(2), slots, starts, torch.tensor([2, 0], dtype=torch.int32), paths)
    for data in pool.data:
        rows = data.view(16, -1)[:, 0].tolist()
        assert rows == [0, 1, 2, 8, 4, 5, 6, 7, 4, 9, 10, 11, 12, 13, 14, 15]


def test_a_pool_on_the_cpu_uses_torch() -> None:
    assert isinstance(random_pool("gqa", 4, torch.bfloat16, CPU)[2], DevicePages)
    assert KvPool(KvLayout(LAYERS["gqa"], torch.bfloat16), 4, 4)._kernels is None
