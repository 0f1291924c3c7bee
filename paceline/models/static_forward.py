"""The inputs of a forward in memory that stays, for CUDA graphs: a batch is copied into it before each replay.

Where the attention plan follows a ``PlacedBatch``, one small copy tells the device a batch, whatever its contexts are
long, and captured work begins with ``derive``. Otherwise the host works everything out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment, StaticPlan, StaticShape, packed_rows
from paceline.attention.padding import Scratch, filler, pad_segments, padded_rows, real_rows
from paceline.attention.placed import (
    SCRATCH_ROW,
    PlacedBatch,
    PlacedPlan,
    ResidentTables,
    filler_end,
    in_place,
    words_of,
)
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import Int64, pinned
from paceline.models.base import ForwardContext
from paceline.models.late_tokens import LateTokens


@dataclass(frozen=True)
class Room:
    """What the static forwards of one pool share."""

    kv: KvPool
    scratch: Scratch
    tables: ResidentTables


def memory_of(shape: StaticShape) -> int:
    """Numbers that a static forward keeps: those that tell a batch, and what is worked out of them."""
    return words_of(shape) + 2 * shape.num_rows


class StaticForward:
    """Rows and attention plan of batches padded to one shape."""

    def __init__(
        self,
        shape: StaticShape,
        attention: AttentionBackend,
        plan: StaticPlan,
        room: Room,
        memory: torch.Tensor | None = None,
    ) -> None:
        """plan: of ``attention`` for ``shape`` over the room's pool. memory: int64 [memory_of(shape)] on the device;
        who gives it may fill its first words (``numbers``) by itself before each replay. It holds fillers at first."""
        self.shape, self._room, self._plan = shape, room, plan
        if memory is None:
            memory = torch.zeros(memory_of(shape), dtype=torch.int64, device=room.kv.device)
        self._words = memory[: words_of(shape)]
        which, ends, counts = self._words[: 3 * shape.requests].view(3, -1)
        self._rows = memory[3 * shape.requests :].view(3, -1)  # token ids, positions, write slots
        batch = ForwardBatch(self._rows[0], self._rows[1], self._rows[2], ())
        self.context = ForwardContext(batch, room.kv, attention, plan)
        self._placed: PlacedBatch | None = None
        self._follower: PlacedPlan | None = None
        if isinstance(plan, PlacedPlan) and not shape.tree:
            self._placed = PlacedBatch(room.tables.tables, which, ends, counts, shape.rows, room.scratch)
            self._follower = plan
        self.fill([] if self._placed is not None else [filler(shape.rows, room.scratch)])

    @classmethod
    def make(
        cls, shape: StaticShape, attention: AttentionBackend, room: Room, memory: torch.Tensor | None = None
    ) -> StaticForward | None:
        """None where the backend cannot be captured at this shape."""
        plan = attention.static_plan(shape, room.kv)
        return None if plan is None else cls(shape, attention, plan, room, memory)

    @property
    def follows(self) -> bool:
        """Whether ``derive`` works the batch out on the device."""
        return self._placed is not None

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether they can be padded to the shape."""
        shape = self.shape
        if len(segments) > shape.requests or (self.follows and not in_place(segments)):
            return False
        return all(
            len(s.token_ids) <= shape.rows and (shape.tree or not s.tails) and s.num_seen <= shape.max_len
            for s in segments
        )

    def fill(self, segments: Sequence[Segment], late: LateTokens | None = None) -> None:
        """Put in a batch that ``fits``, with some of its tokens from the device. The host does not wait for it."""
        if self._placed is not None:
            self._words.copy_(pinned(self._numbers_of(segments), self._words.device), non_blocking=True)
        else:
            padded = pad_segments(segments, self.shape, self._room.scratch)
            self._plan.fill(padded)
            self._rows.copy_(pinned(packed_rows(padded), self._rows.device), non_blocking=True)
        if late is not None:
            late.put(self.context.batch.token_ids, real_rows(segments, self.shape.rows))

    def _numbers_of(self, segments: Sequence[Segment]) -> Int64:
        counts = [len(segment.token_ids) for segment in segments]
        ends = [segment.num_seen for segment in segments]
        which = self._room.tables.rows_of([segment.slots for segment in segments], ends)
        tokens = np.fromiter(chain.from_iterable(s.token_ids for s in segments), np.int64, sum(counts))
        return self.numbers(which, np.array(ends, dtype=np.int64), np.array(counts, dtype=np.int64), tokens)

    def numbers(self, which: Int64, ends: Int64, counts: Int64, tokens: Int64) -> Int64:
        """What the first words of the memory are to hold for a batch, int64 [words_of(shape)]; the host plans its part.
        Only where it ``follows``.

        which: rows of the tables. ends: positions that each segment's last row sees. counts: rows of each; 0: none, the
        segment stands for nothing. [n] each, n no more than the shape has. tokens: of all rows, [sum of counts].
        """
        assert self._follower is not None
        shape, n = self.shape, len(which)
        made = np.zeros(words_of(shape), dtype=np.int64)
        of_segments = made[: 3 * shape.requests].reshape(3, shape.requests)
        of_segments[0, :n] = np.where(counts > 0, which, SCRATCH_ROW)
        of_segments[1] = filler_end(shape.rows, self._room.scratch)
        of_segments[1, :n] = np.where(counts > 0, ends, of_segments[1, 0])
        of_segments[2, :n] = counts
        made[3 * shape.requests + padded_rows(counts, shape.rows)] = tokens
        self._follower.expect(of_segments[1])
        return made

    def derive(self) -> None:
        """Begin captured work with it: rows and plan of the batch that is in place when the work is replayed."""
        if self._placed is not None and self._follower is not None:
            self._placed.positions_and_slots(self._rows[1], self._rows[2])
            self._follower.derive(self._placed)
