"""Attention in plain torch on any device: the reference of the other backends, and what runs where they do not.

The slots that a segment's rows see are gathered once for all of its rows, segments and rows are padded to a rectangle,
and a mask says what each row sees. Softmax and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.attention.base import (
    AttentionBackend,
    AttentionPlan,
    ForwardBatch,
    Segment,
    StaticShape,
)
from paceline.attention.placed import PlacedBatch, PlacedPlan
from paceline.kvcache.pool import KvPool
from paceline.layers import kv8
from paceline.layers.upload import Int64, staged

MAX_SCORES = 2**27  # scores in memory at once, float32: 512 MiB; more rows are taken in blocks
MAX_STATIC = 2**22  # rows times columns of a graph
Bool = npt.NDArray[np.bool_]


def seen_slots(segment: Segment) -> tuple[Int64, Int64, Bool]:
    """The slots that any row of a segment sees and the positions that they hold, int64 [L] each, and which of them each
    row sees, bool [rows, L]."""
    prefix_lens = np.fromiter(segment.prefix_lens, np.int64, len(segment.token_ids))
    longest = int(prefix_lens.max())
    slots = segment.slots[:longest].numpy().astype(np.int64)
    seen = np.arange(longest)[None] < prefix_lens[:, None]
    positions = np.arange(longest)
    places = {
        slot: length + i
        for length, tail in zip(prefix_lens, segment.tails, strict=False)
        for i, slot in enumerate(tail)
    }
    own = sorted(places)
    if not own:
        return slots, positions, seen
    column = {slot: i for i, slot in enumerate(own)}
    tails = np.zeros((len(prefix_lens), len(own)), dtype=np.bool_)
    for row, tail in enumerate(segment.tails):
        tails[row, [column[slot] for slot in tail]] = True
    slots = np.concatenate((slots, np.array(own, dtype=np.int64)))
    positions = np.concatenate((positions, np.array([places[slot] for slot in own], dtype=np.int64)))
    return slots, positions, np.concatenate((seen, tails), axis=1)


def rectangle(segments: Sequence[Segment], rows: int, length: int | None = None) -> tuple[Int64, Int64, Bool]:
    """Slots and their positions, int64 [S, L] (0 where there is none), and visibility bool [S, rows, L] of all
    segments."""
    parts = [seen_slots(segment) for segment in segments]
    length = max(max(slots.size for slots, _, _ in parts), 1) if length is None else length
    columns, places = np.zeros((2, len(parts), length), dtype=np.int64)
    visible = np.zeros((len(parts), rows, length), dtype=np.bool_)
    for s, (slots, positions, seen) in enumerate(parts):
        columns[s, : slots.size] = slots
        places[s, : slots.size] = positions
        visible[s, : seen.shape[0], : seen.shape[1]] = seen
    return columns, places, visible


@dataclass
class DensePlan(AttentionPlan):
    """S segments of N rows (padded), L columns, T rows in the batch."""

    columns: torch.Tensor  # int64 [S, L], slots
    positions: torch.Tensor  # int64 [S, L], that they hold
    visible: torch.Tensor  # bool [S, N, L]
    spread: torch.Tensor | None  # int64 [S * N], the batch row that stands at each place; None: T == S * N, in order
    places: torch.Tensor | None  # int64 [T], the place of each batch row

    def within(self, window: int) -> torch.Tensor:
        """What each row sees of the last ``window`` positions up to its own, bool [S, N, L]; 0: all that it sees. A row
        sees every position up to its own, so their number tells where it stands."""
        if not window:
            return self.visible
        own = self.visible.sum(dim=-1, keepdim=True) - 1
        return self.visible & (self.positions.unsqueeze(1) > own - window)

    def spread_rows(self, query: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [S, N, ...]."""
        rows = query if self.spread is None else query[self.spread]
        return rows.view(*self.visible.shape[:2], *query.shape[1:])

    def collect_rows(self, out: torch.Tensor) -> torch.Tensor:
        """[S, N, ...] -> [T, ...]."""
        rows = out.flatten(0, 1)
        return rows if self.places is None else rows[self.places]


class StaticDensePlan(DensePlan, PlacedPlan):
    """Fixed memory for the longest context; every column is gathered, whatever the batch needs."""

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        columns = torch.zeros(shape.requests, shape.max_len, dtype=torch.int64, device=device)
        visible = torch.zeros(shape.requests, shape.rows, shape.max_len, dtype=torch.bool, device=device)
        super().__init__(columns, torch.zeros_like(columns), visible, None, None)

    def fill(self, segments: Sequence[Segment]) -> None:
        """See StaticPlan."""
        columns, positions, visible = rectangle(segments, self.visible.shape[1], self.visible.shape[2])
        device = self.columns.device
        self.columns.copy_(staged(columns, device))
        self.positions.copy_(staged(positions, device))
        self.visible.copy_(staged(visible, device))

    def derive(self, batch: PlacedBatch) -> None:
        """See PlacedPlan."""
        rows, length = self.visible.shape[1:]
        at, size = torch.arange(length, device=self.columns.device), batch.scratch.page_size
        inside = at < batch.ends.unsqueeze(1)
        slots = batch.tables[batch.which][:, at // size] * size + at % size
        self.columns.copy_(torch.where(inside, slots, 0))
        self.positions.copy_(torch.where(inside, at, 0))
        seen = batch.ends.unsqueeze(1) - rows + 1 + torch.arange(rows, device=at.device)
        self.visible.copy_(at < seen.unsqueeze(2))


class TorchAttention(AttentionBackend):
    """Any device, any geometry."""

    name = "torch"
    row_invariant = False

    def plan(self, batch: ForwardBatch) -> DensePlan:
        """See AttentionBackend."""
        return dense_plan(batch.segments, batch.token_ids.device)

    def static_plan(self, shape: StaticShape, kv: KvPool) -> StaticDensePlan | None:
        """See AttentionBackend. None for contexts so long that gathering all of them each time would not pay."""
        return StaticDensePlan(shape, kv.device) if shape.num_rows * shape.max_len <= MAX_STATIC else None

    def attend(
        self,
        query: torch.Tensor,
        kv: KvPool,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, DensePlan)
        visible = plan.within(window)
        key, value = kv.read(layer, plan.columns.view(-1))
        if kv.layout.is_int8:
            key, value = (kv8.unrounded_rows(rows, query.dtype) for rows in (key, value))
        segments, length = plan.columns.shape
        key, value = (t.float().view(segments, length, *t.shape[1:]) for t in (key, value))  # [S, L, kv_heads, dim]
        group = query.shape[1] // key.shape[2]
        wide = plan.spread_rows(query).float()
        wide = wide.view(*wide.shape[:2], -1, group, wide.shape[3])  # [S, N, kv_heads, group, dim]

        def block(rows: slice) -> torch.Tensor:
            scores = torch.einsum("snkgd,slkd->snkgl", wide[:, rows], key) * scale
            weights = _softmax(scores, visible[:, rows, None, None], sinks)
            return torch.einsum("snkgl,slkd->snkgd", weights, value)

        out = _in_blocks(block, wide.shape[1], segments * query.shape[1] * length)
        return plan.collect_rows(out.flatten(2, 3)).to(query.dtype).contiguous()

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, DensePlan)
        segments, length = plan.columns.shape
        latent = kv.read_latent(layer, plan.columns.view(-1)).float().view(segments, length, -1)
        wide = plan.spread_rows(query).float()  # [S, N, heads, dim]

        def block(rows: slice) -> torch.Tensor:
            scores = torch.einsum("snhd,sld->snhl", wide[:, rows], latent) * scale
            weights = _softmax(scores, plan.visible[:, rows, None])
            return torch.einsum("snhl,sld->snhd", weights, latent[..., :value_dim])

        out = _in_blocks(block, wide.shape[1], segments * query.shape[1] * length)
        return plan.collect_rows(out).to(query.dtype).contiguous()


def dense_plan(segments: Sequence[Segment], device: torch.device) -> DensePlan:
    """The plan of a batch on ``device``."""
    counts = [len(segment.token_ids) for segment in segments]
    most = max(counts)
    columns, positions, visible = rectangle(segments, most)
    spread = places = None
    if min(counts) < most:
        starts = np.cumsum([0, *counts[:-1]])
        offsets = np.arange(most)[None]
        inside = offsets < np.array(counts)[:, None]
        spread = staged(np.where(inside, starts[:, None] + offsets, 0).ravel().astype(np.int64), device)
        places = staged(np.flatnonzero(inside.ravel()).astype(np.int64), device)
    return DensePlan(staged(columns, device), staged(positions, device), staged(visible, device), spread, places)


def _softmax(scores: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Over the last dimension; a row that sees nothing (padding) weighs nothing, rather than being NaN.

    sinks: [num_heads], a score more in each row of [..., kv_heads, group, L], whose weight is left out.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.view(*scores.shape[-3:-1], 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return weights.masked_fill(~visible, 0.0)


def _in_blocks(block: Callable[[slice], torch.Tensor], rows: int, scores_per_row: int) -> torch.Tensor:
    """``block`` over all rows, so many at once as MAX_SCORES allows."""
    step = max(MAX_SCORES // max(scores_per_row, 1), 1)
    if rows <= step:
        return block(slice(0, rows))
    return torch.cat([block(slice(at, min(at + step, rows))) for at in range(0, rows, step)], dim=1)
