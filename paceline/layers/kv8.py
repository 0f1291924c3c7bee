"""Keys and values of 8 bits: a head's row of a token is its codes and one float32 scale behind them.

Rows are rounded where they are written and read back rounded, the ones of the present step too. So a row's bits say
nothing of the chunk, batch or node in which it was computed. Attention makes them numbers tile by tile
(kernels/kv_rows.h). Beside each kernel stands torch, which gives the same bits.
"""

from __future__ import annotations

import torch

from paceline.layers.build import load_kernels

SCALE_BYTES = torch.float32.itemsize  # of the one behind the codes of a row
_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows: [..., D], bf16 or float32 -> int8 [..., D + 4]. scale = largest / 127 in float32, codes to nearest even; a
    row of zeros, or of numbers so small that the scale would be subnormal, has scale 0 and codes 0."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / 127.0
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    codes = torch.where(scale > 0, (wide / scale).round(), 0.0).clamp(-127, 127).to(torch.int8)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), dim=-1)


def unrounded_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """rows: int8 [..., D + 4] -> codes times scale, rounded once to ``dtype``, [..., D]."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)


def write_rows_reference(rows: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """The same as ``write_rows`` in torch."""
    page_size = pages.shape[2]
    pages[slots // page_size, :, slots % page_size] = round_rows(rows).transpose(0, 1)


def write_rows(rows: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """Round keys and values into the pool. rows: [2, T, Hk, D], contiguous; slots: int64 [T], distinct; pages: int8
    [num_pages, 2, page_size, Hk, D + 4]."""
    library = load_kernels() if pages.device.type == "cpu" else None
    if library is None:
        return write_rows_reference(rows, slots, pages)
    _, count, heads, dim = rows.shape
    kernel = getattr(library, f"pl_kv8_write_{_SUFFIX[rows.dtype]}")  # kernels/integer_kv.cpp
    kernel(rows.data_ptr(), count, heads, dim, slots.data_ptr(), pages.shape[2], pages.data_ptr())
    return None
