"""Packed attention masks, made where they are used: the host sends what differs from row to row, not every bit.

A tree of 16 rows over 8,000 columns is 16 KB of mask, all ones but for a corner of 16 by 16.
"""

from __future__ import annotations

import torch

_BITS = 8


def pack_masks(
    prefix_lens: torch.Tensor,
    bases: torch.Tensor,
    tails: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    byte_indptr: torch.Tensor,
    num_bytes: int,
) -> torch.Tensor:
    """``paged.pack_reference`` on any device; tensors as in ``paged.Masks`` and ``paged.PagedBatch``.

    num_bytes: byte_indptr[-1], known to the host. Returns uint8 [num_bytes]; the host does not wait.
    """
    device = prefix_lens.device
    num_requests, width = kv_lens.shape[0], tails.shape[1]
    sizes = (byte_indptr[1:] - byte_indptr[:-1]).long()
    request = torch.repeat_interleave(torch.arange(num_requests, device=device), sizes, output_size=num_bytes)
    at = torch.arange(num_bytes, device=device) - byte_indptr[request]
    bit = at.unsqueeze(1) * _BITS + torch.arange(_BITS, device=device)  # [num_bytes, 8], within the request
    kv_len = kv_lens[request].long().unsqueeze(1)
    inner, column = bit // kv_len, bit % kv_len
    first, last = qo_indptr[request].long().unsqueeze(1), qo_indptr[request + 1].long().unsqueeze(1)
    row = first + inner
    inside = row < last  # bits past the last row fill its last byte
    row = row.clamp(max=tails.shape[0] - 1)
    offset = column - bases[request].unsqueeze(1)
    tail = tails[row, offset.clamp(0, width - 1)] > 0
    seen = (column < prefix_lens[row]) | (tail & (offset >= 0) & (offset < width))
    return ((seen & inside).int() << torch.arange(_BITS, dtype=torch.int32, device=device)).sum(dim=1).to(torch.uint8)
