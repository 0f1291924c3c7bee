"""What one forward computes over, and what an attention backend is.

A forward takes rows of several sequences at once. Every row stands at an absolute position and sees exactly the
positions 0..own of its own sequence; where those positions live in the pool (slots) is given per sequence by a
position-to-slot list. A row of a draft tree reads its ancestors instead of its siblings, through its own tail of
slots, so that it computes the same as the same row decoded plainly (docs/internals/exactness.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import staged


class SlotsInPlace(Sequence[int]):
    """``write_slots`` of rows that write where they stand, start..end-1; read when somebody asks."""

    def __init__(self, slots: torch.Tensor, start: int, end: int) -> None:
        """slots: int32 [at least end], position -> slot."""
        self.start, self.end, self._slots = start, end, slots

    @cached_property
    def _all(self) -> list[int]:
        return self._slots[self.start : self.end].tolist()

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence.

    Row i holds ``token_ids[i]`` at ``positions[i]`` and writes its KV to ``write_slots[i]``. It sees
    ``slots[0:prefix_lens[i]]`` (positions 0..prefix_lens[i]-1) and then ``tails[i]``, one slot for each further
    position up to its own. A plain row has an empty tail and ``prefix_lens[i] == positions[i] + 1``.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    slots: torch.Tensor  # int32 [>= max(prefix_lens)], position -> slot; what it says of a position stays as it is
    prefix_lens: Sequence[int]
    tails: Sequence[Sequence[int]] = ()

    @classmethod
    def linear(cls, token_ids: Sequence[int], start: int, slots: torch.Tensor) -> Segment:
        """Rows at positions start, start+1, ... in order: prefill, plain decode, chain verify, draft extend."""
        end = start + len(token_ids)
        return cls(token_ids, range(start, end), SlotsInPlace(slots, start, end), slots, range(start + 1, end + 1))

    @property
    def in_place(self) -> bool:
        """Whether it is ``linear``: where its rows stand and write follows from its last position."""
        return isinstance(self.write_slots, SlotsInPlace)

    @property
    def num_seen(self) -> int:
        """Positions that the row with the longest prefix sees of it."""
        own = self.write_slots
        return own.end if isinstance(own, SlotsInPlace) else max(self.prefix_lens)

    @classmethod
    def tree(cls, token_ids: Sequence[int], parents: Sequence[int], start: int, slots: torch.Tensor) -> Segment:
        """Rows of a tree whose root stands at position ``start``; node i writes slot ``slots[start + i]``.

        token_ids, parents: [num_nodes], parents[0] == -1, parents[i] < i. slots: at least start + num_nodes.
        """
        own = slots[start : start + len(token_ids)].tolist()
        tails: list[list[int]] = []
        for i, parent in enumerate(parents):
            tails.append([*(tails[parent] if parent >= 0 else []), own[i]])
        positions = [start + len(tail) - 1 for tail in tails]
        return cls(token_ids, positions, own, slots, [start] * len(parents), tails)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward, concatenated over segments; T rows in all."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    write_slots: torch.Tensor  # int64 [T], distinct
    segments: tuple[Segment, ...]

    @classmethod
    def build(cls, segments: Sequence[Segment], device: torch.device | str = "cpu") -> ForwardBatch:
        """Concatenate segments; one copy to the device."""
        rows = staged(packed_rows(segments), torch.device(device))
        return cls(rows[0], rows[1], rows[2], tuple(segments))

    @property
    def num_rows(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    def row_ranges(self) -> list[range]:
        """Rows of each segment."""
        ranges, at = [], 0
        for segment in self.segments:
            ranges.append(range(at, at + len(segment.token_ids)))
            at += len(segment.token_ids)
        return ranges


def packed_rows(segments: Sequence[Segment]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Token ids, positions and write slots of all rows, int64 [3, T] on the host."""
    names = ("token_ids", "positions", "write_slots")
    rows = [list(chain.from_iterable(getattr(segment, name) for segment in segments)) for name in names]
    return np.array(rows, dtype=np.int64).reshape(3, -1)


@dataclass(frozen=True)
class StaticShape:
    """The fixed shape of the batches that one CUDA graph serves (``padding.pad_segments`` makes them)."""

    requests: int  # segments, fillers included
    rows: int  # of each segment
    tree: bool  # rows may have tails; without, every segment is linear
    max_len: int  # positions that a row may see at most

    @property
    def num_rows(self) -> int:
        """T."""
        return self.requests * self.rows


class AttentionPlan(ABC):  # noqa: B024  (each backend's own; opaque to models)
    """What a backend derives from a batch once per forward, for all layers."""


class StaticPlan(AttentionPlan):
    """A plan whose device memory stays where it is: kernels captured over it read the batch that was put in last."""

    @abstractmethod
    def fill(self, segments: Sequence[Segment]) -> None:
        """Put in a batch of the plan's shape, outside of any capture. The host does not wait for the device."""


class AttentionBackend(ABC):
    """Causal softmax attention over the paged pool.

    ``row_invariant`` states that a row's bits depend on its own query and its keys and values in order of
    position alone: not on other rows, slots, page size or tree.
    """

    name: str
    row_invariant: bool

    left: Set[str] = frozenset()  # forwards so far that another backend computed, in words

    def left_to(self, layout: KvLayout, num_heads: int) -> dict[str, str]:
        """Forwards over a pool of ``layout`` that this backend leaves to another one, in words, and to which."""
        return {}

    @property
    def kernels(self) -> str:
        """What makes its bits, by name and version; nodes that pair compare it."""
        return self.name

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Derive index structures for ``batch``."""

    def static_plan(self, shape: StaticShape, kv: KvPool) -> StaticPlan | None:
        """A plan for CUDA graphs of ``shape`` over ``kv``; None where the backend cannot be captured."""
        return None

    @abstractmethod
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
        """Attention of each row over its visible positions.

        query: [T, num_heads, head_dim], rope applied; the rows' own keys and values are in the pool already.
        window: a row sees the last ``window`` positions up to its own, 0: all; a tree's row counts its ancestors.
        sinks: float32 [num_heads], a score without a value that takes its share of each softmax; None: none.
        Returns [T, num_heads, head_dim] of query's dtype. Query head h reads KV head h // (num_heads / num_kv_heads).
        Raises ValueError where the backend has no such attention.
        """

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        """Latent attention (MLA, absorbed form): all heads read one row per position of an MLA layer.

        query: [T, num_heads, D], D the layer's head_dim; a position's row is its key, and the first ``value_dim``
        elements of it are its value. The rows' own latents are in the pool already. Returns [T, num_heads, value_dim]
        of query's dtype. Raises ValueError where the backend has none.
        """
        raise ValueError(f"attention backend {self.name!r} has no latent attention (MLA)")
