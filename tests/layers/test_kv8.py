"""Rows of 8 bits: what is written and read back, kernel beside torch, and attention over it."""

from __future__ import annotations

import pytest
import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers import kv8
from tests.support.needs import needs_kernels

HEADS, DIM, PAGE, PAGES = 2, 32, 8, 20
LAYER = KvLayer(LayerKind.GQA, LayerOwner.TARGET, HEADS, DIM)
DTYPES = [torch.bfloat16, torch.float32]

pytestmark = needs_kernels


def random_rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values; rows of unlike sizes, a row of zeros, and one whose codes lie between two."""
    sizes = 10.0 ** torch.randint(-6, 5, (2, count, HEADS, 1))
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
    assert (far <= largest * (0.5001 / 127 + rounding)).all()  # half a step of its own head and token


def test_codes_by_the_definition() -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0])
    kept = kv8.round_rows(row)
    assert kept[:8].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]  # to nearest even
    assert kept[8:].view(torch.float32).item() == 1.0
    assert kv8.round_rows(torch.zeros(8)).tolist() == [0] * 12


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_what_a_pool_of_the_rounded_rows_has(dtype: torch.dtype) -> None:
    """Over plain rows, a window and trees, in both backends: the bits of the same backend over unrounded rows."""
    coded = KvPool(KvLayout.of([LAYER], dtype, "int8"), PAGES, PAGE)
    plain = KvPool(KvLayout.of([LAYER], dtype), PAGES, PAGE)
    every = torch.arange(PAGES * PAGE)
    kv8.write_rows(random_rows(len(every), dtype), every, coded.data[0])
    read = numbers(coded.data[0], every, dtype)
    plain.data[0][every // PAGE, :, every % PAGE] = read.transpose(0, 1)
    own, other = torch.split(torch.randperm(PAGES * PAGE, dtype=torch.int32), [140, 20])
    batch = ForwardBatch.build(
        [
            Segment.linear(list(range(20)), 112, own),
            Segment.linear([1], 9, other),
            Segment.tree([1, 2, 3, 4], [-1, 0, 0, 2], 12, other),
        ]
    )
    query = torch.randn(batch.num_rows, 6, DIM).to(dtype)
    for backend in (CpuAttention(), TorchAttention()):
        plan = backend.plan(batch)
        for window in (0, 7):
            found = backend.attend(query, coded, 0, plan, 0.2, window)
            assert torch.equal(found, backend.attend(query, plain, 0, plan, 0.2, window))
