"""Pools of every kind of layer, and the checks of ``DevicePages`` against ``KvPool``'s torch loops, for any device."""

from __future__ import annotations

import torch

from paceline.kvcache.device_pages import DevicePages
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.kvcache.unit_table import UnitTable

GQA = KvLayer(LayerKind.GQA, LayerOwner.TARGET, num_kv_heads=3, head_dim=8)
WIDE = KvLayer(LayerKind.GQA, LayerOwner.TARGET, num_kv_heads=8, head_dim=128)
ODD = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, num_kv_heads=1, head_dim=5)
MLA = KvLayer(LayerKind.MLA, LayerOwner.TARGET, num_kv_heads=1, head_dim=576)
LAYERS = {
    "gqa": (GQA, GQA, GQA),
    "wide": (WIDE, GQA),
    "mla": (MLA, MLA),
    "mixed": (MLA, GQA, ODD),
}
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def random_pool(
    name: str, page_size: int, dtype: torch.dtype, device: torch.device, num_slots: int = 64
) -> tuple[KvPool, KvPool, DevicePages]:
    """(pool of torch loops on the CPU, the same pool on the device, its kernels)."""
    layout = KvLayout(LAYERS[name], dtype)
    truth = KvPool(layout, num_slots // page_size, page_size)
    for data in truth.data:
        data.copy_(torch.randint(0, 100, data.shape).to(dtype))
    there = KvPool(layout, num_slots // page_size, page_size, device)
    for source, data in zip(truth.data, there.data, strict=True):
        data.copy_(source)
    return truth, there, DevicePages(UnitTable.of(there._flat, layout, page_size))


def assert_same(truth: KvPool, there: KvPool) -> None:
    for expected, found in zip(truth.data, there.data, strict=True):
        assert torch.equal(expected, found.cpu())


def check_gather_and_scatter(device: torch.device, name: str, page_size: int, dtype: torch.dtype) -> None:
    """Canonical order, all layers and some, int32 and int64 slots, slots in no order."""
    truth, there, kernels = random_pool(name, page_size, dtype, device)
    num_layers = len(truth.data)
    for layers in (range(num_layers), range(1, num_layers), range(1)):
        for count in (1, 19):
            slots = torch.randperm(64)[:count].to(torch.int32 if count == 1 else torch.int64)
            found = kernels.gather(layers, slots.to(device))
            assert torch.equal(truth.gather(layers, slots), found.cpu())
            fresh = torch.randint(0, 100, found.shape).to(dtype)
            truth.scatter(layers, slots, fresh)
            kernels.scatter(layers, slots.to(device), fresh.to(device))
            assert_same(truth, there)
            shifted = torch.cat((fresh[:1], fresh)).to(device)[1:]  # data that begins at no multiple of a unit
            kernels.scatter(layers, slots.to(device), shifted)
            assert_same(truth, there)


def check_compaction(device: torch.device, name: str, page_size: int, dtype: torch.dtype) -> None:
    """``keep_paths`` by kernel and by torch against ``copy_slots`` of each tree."""
    truth, there, kernels = random_pool(name, page_size, dtype, device)
    plain = KvPool(truth.layout, truth.num_pages, page_size)
    for source, data in zip(truth.data, plain.data, strict=True):
        data.copy_(source)
    paths = [[2, 3, 7], [], [1, 2], [4], [1, 3, 4, 5, 9]]
    sizes = [9, 1, 4, 6, 10]
    slots = torch.randperm(64)[: sum(sizes)].to(torch.int32)
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    layers = range(1, len(truth.data))
    walked = torch.full((len(paths), 8), 2**20, dtype=torch.int32)  # past its length a path is not to be read
    for i, (path, start) in enumerate(zip(paths, starts.tolist(), strict=False)):
        walked[i, 0] = len(path)
        walked[i, 3 : 3 + len(path)] = torch.tensor(path, dtype=torch.int32)
        own = slots[start:]
        truth.copy_slots(layers, own[path], own[1 : 1 + len(path)])
    plain.keep_paths(layers, slots, starts, walked[:, 0], walked[:, 3:])
    assert_same(truth, plain)
    walked = walked.to(device)
    kernels.compact(layers, slots.to(device), starts.to(device), walked[:, 0], walked[:, 3:])
    assert_same(truth, there)
