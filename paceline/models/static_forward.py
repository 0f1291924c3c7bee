"""The inputs of a forward in memory that stays, for CUDA graphs: a batch is copied into it before each replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment, StaticPlan, StaticShape, packed_rows
from paceline.attention.padding import Scratch, filler, pad_segments, real_rows
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import pinned
from paceline.models.base import ForwardContext
from paceline.models.late_tokens import LateTokens


class StaticForward:
    """Rows and attention plan of batches padded to one shape."""

    def __init__(
        self, shape: StaticShape, kv: KvPool, attention: AttentionBackend, plan: StaticPlan, scratch: Scratch
    ) -> None:
        """plan: of ``attention`` for ``shape`` over ``kv``. It holds fillers at first."""
        self.shape, self._scratch, self._plan = shape, scratch, plan
        self._rows = torch.zeros(3, shape.num_rows, dtype=torch.int64, device=kv.device)
        batch = ForwardBatch(self._rows[0], self._rows[1], self._rows[2], ())
        self.context = ForwardContext(batch, kv, attention, plan)
        self.fill([filler(shape.rows, scratch)])

    @classmethod
    def make(
        cls, shape: StaticShape, kv: KvPool, attention: AttentionBackend, scratch: Scratch
    ) -> StaticForward | None:
        """None where the backend cannot be captured at this shape."""
        plan = attention.static_plan(shape, kv)
        return None if plan is None else cls(shape, kv, attention, plan, scratch)

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether they can be padded to the shape."""
        shape = self.shape
        return len(segments) <= shape.requests and all(
            len(s.token_ids) <= shape.rows and (shape.tree or not s.tails) and max(s.prefix_lens) <= shape.max_len
            for s in segments
        )

    def fill(self, segments: Sequence[Segment], late: LateTokens | None = None) -> None:
        """Put in a batch that ``fits``, with some of its tokens from the device. The host does not wait for it."""
        padded = pad_segments(segments, self.shape, self._scratch)
        self._plan.fill(padded)
        self._rows.copy_(pinned(packed_rows(padded), self._rows.device), non_blocking=True)
        if late is not None:
            late.put(self.context.batch.token_ids, real_rows(segments, self.shape.rows))
