"""Random batches over random page tables: prompts, decodes, chains, trees and draft levels, for attention tests."""

from __future__ import annotations

import random

import torch

from paceline.attention.base import Segment
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool


def filled_pool(
    kind: LayerKind, kv_heads: int, dim: int, page_size: int, num_pages: int, dtype: torch.dtype, device: str = "cpu"
) -> KvPool:
    """One layer of random numbers."""
    kv = KvPool(KvLayout((KvLayer(kind, LayerOwner.TARGET, kv_heads, dim),), dtype), num_pages, page_size, device)
    generator = torch.Generator().manual_seed(3)
    kv.data[0].copy_(torch.randn(kv.data[0].shape, generator=generator).to(dtype))
    return kv


class Tables:
    """Deals out pages that no other sequence has."""

    def __init__(self, rng: random.Random, num_pages: int, page_size: int) -> None:
        self.rng, self.page_size = rng, page_size
        self._free = list(range(num_pages))
        rng.shuffle(self._free)

    def slots(self, num_tokens: int) -> torch.Tensor:
        """Position -> slot of a new sequence, whole pages, int32."""
        pages = torch.tensor([self._free.pop() for _ in range(-(-num_tokens // self.page_size))], dtype=torch.int32)
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, dtype=torch.int32)).flatten()

    def linear(self, rows: int, start: int) -> Segment:
        """Consecutive rows; the table goes on behind them."""
        return Segment.linear([1] * rows, start, self.slots(start + rows + self.rng.randrange(9)))

    def tree(self, rows: int, start: int) -> Segment:
        """A random tree."""
        parents = [-1, *(self.rng.randrange(i) for i in range(1, rows))]
        return Segment.tree([1] * rows, parents, start, self.slots(start + rows + self.rng.randrange(9)))

    def level(self, rows: int, committed: int, depth: int) -> Segment:
        """A level of a draft: rows of one depth whose paths lie anywhere in the slots behind the prefix."""
        slots = self.slots(committed + rows * depth + 2)
        free = slots[committed : committed + rows * depth].tolist()
        self.rng.shuffle(free)
        tails = [free[i * depth : (i + 1) * depth] for i in range(rows)]
        at = committed + depth - 1
        return Segment([1] * rows, [at] * rows, [t[-1] for t in tails], slots, [committed] * rows, tails)


def random_batch(
    rng: random.Random, page_size: int, num_pages: int, kinds: str = "lcdt", most: int = 5
) -> list[Segment]:
    """Segments of the kinds named: (l)inear rows of a prompt, (c)hains, (d)ecode rows, (t)rees, draft le(v)els."""
    tables = Tables(rng, num_pages, page_size)
    segments = []
    for _ in range(rng.randint(1, most)):
        start = rng.randint(1, 40)
        match rng.choice(kinds):
            case "l":
                segments.append(tables.linear(rng.randint(1, 20), rng.choice([0, start])))
            case "c":
                segments.append(tables.linear(rng.randint(2, 5), start))
            case "d":
                segments.append(tables.linear(1, start))
            case "t":
                segments.append(tables.tree(rng.randint(2, 9), start))
            case _:
                segments.append(tables.level(rng.randint(1, 4), start, rng.randint(1, 3)))
    return segments


def num_rows(segments: list[Segment]) -> int:
    """Rows of a batch."""
    return sum(len(segment.token_ids) for segment in segments)


def plain_attention(
    query: torch.Tensor, kv: KvPool, segments: list[Segment], scale: float, value_dim: int = 0
) -> torch.Tensor:
    """Row by row from the definition of a segment: the slots that a row sees, softmax in float64."""
    rows, at = [], 0
    for segment in segments:
        for i in range(len(segment.token_ids)):
            tail = segment.tails[i] if segment.tails else ()
            slots = torch.tensor([*segment.slots[: segment.prefix_lens[i]].tolist(), *tail])
            one = query[at].double()
            if value_dim:
                key = kv.read_latent(0, slots).double()[:, None].expand(-1, one.shape[0], -1)
                value = key[..., :value_dim]
            else:
                pair = kv.read(0, slots)
                group = one.shape[0] // pair[0].shape[1]
                key, value = (t.double().repeat_interleave(group, dim=1) for t in pair)
            weights = (torch.einsum("hd,nhd->hn", one, key) * scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, value))
            at += 1
    return torch.stack(rows).to(query.dtype)
