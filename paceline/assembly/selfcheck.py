"""The invariance probe (docs/internals/exactness.md): does this host give a row the same bits however it is batched?

Run on the real weights when a node starts. Its answer goes to the log and to ModelInfo, and the digest of its bits to
the fingerprint: builds and hosts that give other bits do not pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.pool import KvPool
from paceline.kvcache.table import PageTable
from paceline.models.base import ForwardContext, TargetModel
from paceline.request import SamplingParams
from paceline.sampling.sampler import RowContext, sample_rows

PROBE_TOKENS = 67  # ragged against every tile and row block in use
DRAWS = 12  # tokens that are drawn
# At once, and in chunks of many sizes: single rows, as decoding has, come last, where the context is longest.
CHUNKINGS = ((PROBE_TOKENS,), (33, 17, 8, 4, 2, 1, 1, 1))


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


@dataclass(frozen=True)
class ProbedBits:
    """exact: whether all chunkings of one text gave the same bits. digest: of the text's last logits and of tokens that
    are drawn from them, which nodes of one text have alike, whatever else they are; empty where bits are not exact."""

    exact: bool
    digest: str


def probe_bits(model: TargetModel, kv: KvPool, allocator: PageAllocator, attention: AttentionBackend) -> ProbedBits:
    """One text at once and in chunks, on whichever rank its rows lie."""
    tokens = [(7919 * i + 13) % model.spec.vocab_size for i in range(PROBE_TOKENS)]
    runs = range(max(len(CHUNKINGS), allocator.parts))
    places = [(CHUNKINGS[run % len(CHUNKINGS)], run % allocator.parts) for run in runs]
    first, *others = (logits_in_chunks(model, kv, allocator, attention, tokens, *place) for place in places)
    if not all(torch.equal(first, other) for other in others):
        return ProbedBits(False, "")
    last = first[-1:].repeat(DRAWS, 1)
    rows = [_drawn_at(seed, tokens) for seed in range(DRAWS)]
    digest = hashlib.blake2b(last[0].cpu().numpy().tobytes(), digest_size=8)
    digest.update(repr(sample_rows(last, rows)).encode())
    return ProbedBits(True, digest.hexdigest())


def _drawn_at(seed: int, tokens: Sequence[int]) -> RowContext:
    """A draw by all that a request may ask of one."""
    top_k, top_p = 40 * (seed % 2), 1.0 - 0.1 * (seed % 3)
    params = SamplingParams(temperature=1.0, seed=seed, top_k=top_k, top_p=top_p, presence_penalty=0.5 * (seed % 4))
    return RowContext(params, len(tokens), tokens, tokens[-4:], ())
