"""The invariance probe (docs/internals/exactness.md): does this host give a row the same bits however it is batched?

Run on the real weights when a node starts; its answer goes to the log and to ModelInfo.
"""

from __future__ import annotations

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.pool import KvPool
from paceline.kvcache.table import PageTable
from paceline.models.base import ForwardContext, TargetModel

PROBE_TOKENS = 67  # ragged against every tile and row block in use
CHUNKINGS = ((PROBE_TOKENS,), (1,) * 5 + (PROBE_TOKENS - 5,), (30, 18, 2, 16, 1), (33, 34))


def logits_in_chunks(
    model: TargetModel,
    kv: KvPool,
    allocator: PageAllocator,
    attention: AttentionBackend,
    token_ids: list[int],
    chunks: tuple[int, ...],
    part: int = 0,
) -> torch.Tensor:
    """Logits of every row, float32 [len(token_ids), vocab_size], run in chunks of the given sizes. part: of the pool,
    where the rows lie."""
    table = PageTable(allocator, kv.page_size, part=part)
    try:
        table.ensure(len(token_ids))
        rows, start = [], 0
        for size in chunks:
            segment = Segment.linear(token_ids[start : start + size], start, table.slots)
            context = ForwardContext.build(ForwardBatch.build([segment], model.device), kv, attention)
            rows.append(model.logits(model.forward(context)))
            start += size
        return torch.cat(rows)
    finally:
        table.release()


def is_bit_exact(model: TargetModel, kv: KvPool, allocator: PageAllocator, attention: AttentionBackend) -> bool:
    """Whether all chunkings of one text give the same bits, on whichever rank its rows lie."""
    tokens = [(7919 * i + 13) % model.spec.vocab_size for i in range(PROBE_TOKENS)]
    places = [(chunks, i % allocator.parts) for i, chunks in enumerate(CHUNKINGS)]
    first, *others = (logits_in_chunks(model, kv, allocator, attention, tokens, *place) for place in places)
    return all(torch.equal(first, other) for other in others)
