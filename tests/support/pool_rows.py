"""Rows into one layer of a pool, as ``KvPool.read`` and ``read_latent`` give them out."""

from __future__ import annotations

import torch

from paceline.kvcache.pool import KvPool


def write_rows(pool: KvPool, layer: int, slots: torch.Tensor, *parts: torch.Tensor) -> None:
    """slots: [T]; parts: key and value, [T, num_kv_heads, head_dim] each, or latent rows, [T, head_dim]."""
    rows = torch.cat([part.flatten(1) for part in parts], dim=1)
    pool.scatter(range(layer, layer + 1), slots, rows.view(-1))
