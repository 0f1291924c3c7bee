"""The page kernels on a GPU against the pool's torch loops on the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.kvcache.device_pages import DevicePages
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from tests.support.device_pages import DTYPES, LAYERS, check_compaction, check_gather_and_scatter, random_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_gather_and_scatter(name: str, page_size: int, dtype: torch.dtype) -> None:
    check_gather_and_scatter(CUDA, name, page_size, dtype)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_compaction(name: str, page_size: int) -> None:
    check_compaction(CUDA, name, page_size, torch.bfloat16)


def test_a_pool_uses_the_kernels_and_does_not_wait() -> None:
    truth, pool, _ = random_pool("mixed", 8, torch.bfloat16, CUDA)
    assert isinstance(pool._kernels, DevicePages)
    slots = torch.randperm(64)[:20]
    there, layers = slots.to(CUDA), range(3)
    pool.scatter(layers, there, pool.gather(layers, there))
    pool.copy_slots(layers, there[:3], there[:3])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = pool.gather(layers, there)
        pool.scatter(layers, there, found)
        pool.copy_slots(layers, there[:10], there[5:15])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), truth.gather(layers, slots))
    truth.copy_slots(layers, slots[:10], slots[5:15])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(truth.data, pool.data, strict=True))


def test_many_layers_and_tokens() -> None:
    """More than 2**31 bytes lie between the first layer and the last."""
    layout = KvLayout(LAYERS["wide"][:1] * 8, torch.bfloat16)
    pool = KvPool(layout, 8192, 16, CUDA)
    slots = torch.randperm(8192 * 16, device=CUDA)[:5000]
    data = torch.randint(0, 100, (5000 * sum(layer.row_elems for layer in layout.layers),), device=CUDA)
    data = data.to(torch.bfloat16)
    pool.scatter(range(8), slots, data)
    assert torch.equal(pool.gather(range(8), slots), data)
    per_layer = data.view(8, 5000, 2, 8, 128)
    for layer in range(8):
        key, value = pool.read(layer, slots)
        assert torch.equal(key, per_layer[layer, :, 0])
        assert torch.equal(value, per_layer[layer, :, 1])
