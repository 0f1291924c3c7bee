"""Data-parallel attention: every rank has whole attention layers, and runs them for the sequences that live on it.

The slots of a sequence say on which rank it lives (dealt_pool.py). So each rank deals a batch of its own accord, all of
them alike, and no message says who does what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.models.context import ForwardContext
from paceline.models.one_rank import Attention
from paceline.ranks.dealt_pool import OwnedPool
from paceline.ranks.group import Group


@dataclass(frozen=True)
class Deal:
    """Whose the rows of a batch are; the same on every rank but for what is its own. T rows."""

    counts: tuple[int, ...]  # rows of each rank
    places: torch.Tensor  # int64 [T], where each row stands among those of all ranks, in order of rank
    rows: torch.Tensor  # int64 [R], this rank's rows of the batch
    own: ForwardContext | None  # over them; slots are those of this rank's memory. None: it has no row


@dataclass(frozen=True)
class DealtContext(ForwardContext):
    """A forward whose attention is dealt. ``batch``: the rows of all ranks."""

    deal: Deal | None = None


def dealt(context: ForwardContext) -> DealtContext:
    """context: of all ranks, over this rank's pool."""
    kv, batch = context.kv, context.batch
    assert isinstance(kv, OwnedPool)
    rows_of: list[list[int]] = [[] for _ in range(kv.degree)]
    own: list[Segment] = []
    for segment, run in zip(batch.segments, batch.row_ranges(), strict=True):
        owner = segment.write_slots[0] // kv.own_slots
        rows_of[owner] += run
        if owner == kv.rank:
            own.append(_shifted(segment, kv.first_slot))
    order = torch.tensor([row for rows in rows_of for row in rows], dtype=torch.int64, device=batch.token_ids.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = tuple(map(len, rows_of))
    rows = order[sum(counts[: kv.rank]) : sum(counts[: kv.rank + 1])]
    mine = ForwardContext.build(_batch_of(batch, rows, own, kv.first_slot), kv, context.attention) if own else None
    every = {field.name: getattr(context, field.name) for field in fields(ForwardContext)}
    return DealtContext(**every, deal=Deal(counts, places, rows, mine))


def _batch_of(batch: ForwardBatch, rows: torch.Tensor, own: Sequence[Segment], first: int) -> ForwardBatch:
    return ForwardBatch(batch.token_ids[rows], batch.positions[rows], batch.write_slots[rows] - first, tuple(own))


def _shifted(segment: Segment, first: int) -> Segment:
    """With slots that count from ``first``."""
    if not first:
        return segment
    write_slots = [slot - first for slot in segment.write_slots]
    tails = [[slot - first for slot in tail] for tail in segment.tails]
    return replace(segment, write_slots=write_slots, slots=segment.slots - first, tails=tails)


class DealtAttention:
    """Attention of one layer over a dealt batch: each rank attends its rows, and gets all others."""

    def __init__(self, attention: Attention, group: Group) -> None:
        """attention: with all heads."""
        self._attention, self._group = attention, group

    def __call__(self, x: torch.Tensor, table: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden], of all ranks' rows. A rank without rows takes part in the exchange all the
        same: the others wait for it."""
        assert isinstance(context, DealtContext)
        assert context.deal is not None
        deal, mine = context.deal, x.new_empty(0, x.shape[1])
        if deal.own is not None:
            mine = self._attention(x[deal.rows], table, deal.own)
        return self._group.share_rows(mine, deal.counts)[deal.places]
