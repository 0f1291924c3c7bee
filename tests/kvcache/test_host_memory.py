"""Memory for what is large and long-lived: zeros, aligned, in huge pages from two of them on."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from kv_transfer.handoff.staging import Staging, StagingRing
from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS
from kv_transfer.transports.loopback import loopback_pair
from paceline.host_memory import ALIGNMENT, host_zeros
from paceline.huge_pages import HUGE_PAGE
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool

TRANSPARENT_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def asked_for_huge_pages(address: int) -> bool:
    """Whether the mapping of ``address`` was advised to be made of them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 2 * HUGE_PAGE - 1, 2 * HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_zeros_of_any_size_are_aligned(num_bytes: int) -> None:
    memory = host_zeros(num_bytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (num_bytes,)
    assert not int(memory.count_nonzero())
    assert memory.data_ptr() % (HUGE_PAGE if num_bytes >= 2 * HUGE_PAGE else ALIGNMENT) == 0


def test_large_memory_is_asked_for_in_huge_pages() -> None:
    memory = host_zeros(8 * HUGE_PAGE)
    memory.fill_(7)
    asked = asked_for_huge_pages(memory.data_ptr() + 4 * HUGE_PAGE)
    assert asked == TRANSPARENT_HUGE_PAGES.exists()


def test_a_pool_and_both_ends_of_a_link_live_there() -> None:
    layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 64)
    pool = KvPool(KvLayout((layer, layer), torch.bfloat16), num_pages=512, page_size=16)
    assert [data.data_ptr() % HUGE_PAGE for data in pool.data] == [0, 0]

    ring = StagingRing()
    sent = [ring.take(MESSAGE_BYTES) for _ in range(NUM_BUFFERS)]
    assert {buffer.data_ptr() % HUGE_PAGE for buffer in sent} == {0}
    assert len({buffer.data_ptr() for buffer in sent}) == NUM_BUFFERS

    _, recv_end = loopback_pair()
    received = Staging(recv_end, "cpu")._free
    assert {buffer.data_ptr() % HUGE_PAGE for buffer in received} == {0}
    assert len({buffer.data_ptr() for buffer in received}) == NUM_BUFFERS


def test_large_memory_is_none_that_something_freed() -> None:
    """Mutant: memory of the C library, which gives again what was freed and writes every byte of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(2):  # the second one comes from the heap: what is freed teaches the C library how large that may be
        torch.ones(12 * HUGE_PAGE, dtype=torch.uint8)
    memory = host_zeros(10 * HUGE_PAGE)
    resident = (ctypes.c_uint8 * (memory.numel() // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), resident) == 0
    assert not any(page & 1 for page in resident)
