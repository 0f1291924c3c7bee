"""Pools of sharded sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_transfer.layout.reshard import Side
from paceline.kvcache.layout import KvLayout, LayerKind
from paceline.kvcache.pool import KvPool
from tests.support.pool_rows import write_rows


def random_rows(layout: KvLayout, num_tokens: int, seed: int) -> list[Tensor]:
    """A sequence's KV, whole: of each layer [num_tokens, K and V or latent, heads, width] of the layout's dtype."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for layer in layout.layers:
        planes, heads = (1, 1) if layer.kind is LayerKind.MLA else (2, layer.num_kv_heads)
        rows.append(torch.randn(num_tokens, planes, heads, layer.head_dim, generator=generator).to(layout.dtype))
    return rows


def cut(full: Tensor, degree: int, rank: int) -> Tensor:
    """A rank's share of a layer, the plain way: repeat heads until there is one for each rank, then deal."""
    copies = max(1, degree // full.shape[2])
    return full.repeat_interleave(copies, dim=2).chunk(degree, dim=2)[rank]


def scattered_slots(num_tokens: int, page_size: int, num_pages: int, seed: int) -> Tensor:
    """Slots of consecutive positions in pages in no order, as a page table gives them: int32 [num_tokens]."""
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    slots = (pages[:, None] * page_size + torch.arange(page_size)).view(-1)[:num_tokens]
    assert len(slots) == num_tokens
    return slots.int()


def make_pool(side: Side, num_tokens: int, page_size: int) -> KvPool:
    """A rank's pool, with room to spare, every element a value that no row has."""
    pool = KvPool(side.local, num_tokens // page_size + 3, page_size)
    for data in pool.data:
        data.fill_(77.0)
    return pool


def fill(pool: KvPool, slots: Tensor, rows: Sequence[Tensor]) -> None:
    """Store a rank's share of rows, [tokens, planes, heads, width] by layer."""
    for index, tensor in enumerate(rows):
        if tensor.shape[1] == 1:
            write_rows(pool, index, slots, tensor[:, 0, 0])
        else:
            write_rows(pool, index, slots, tensor[:, 0], tensor[:, 1])


def read(pool: KvPool, slots: Tensor) -> list[Tensor]:
    """Inverse of `fill`."""
    rows = []
    for index, layer in enumerate(pool.layout.layers):
        if layer.kind is LayerKind.MLA:
            rows.append(pool.read_latent(index, slots)[:, None, None])
        else:
            rows.append(torch.stack(pool.read(index, slots), dim=1))
    return rows
