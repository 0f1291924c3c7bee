"""Checks of ``TritonAttention`` for any device: against the reference, and that a row's bits are its own.

Pools hold NaN wherever a sequence has written nothing: what should not be read would show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch

from paceline.attention import triton_paged
from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch, Segment, StaticShape
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.placed import ResidentTables
from paceline.attention.torch_paged import TorchAttention
from paceline.attention.triton_paged import TritonAttention
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.static_forward import Room, StaticForward
from tests.support.paged_batches import filled_pool, num_rows, random_batch
from tests.support.pool_rows import write_rows
from tests.support.tolerance import Tolerance

PAGE = 4
CLOSE: dict[torch.dtype, Tolerance] = {
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 4e-3, "atol": 2e-3},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}
PARENTS = (-1, 0, 0, 2, 2, 4, 4, 6)
PATH = (0, 2, 4, 6, 7)  # the nodes that the sequence itself goes through; the others are strangers


@dataclass(frozen=True)
class Geometry:
    """Heads and widths of a layer. value_dim: of MLA, 0 for GQA."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int = 0

    @property
    def kind(self) -> LayerKind:
        """What the pool keeps of a position."""
        return LayerKind.MLA if self.value_dim else LayerKind.GQA

    def attend(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        kv: KvPool,
        plan: AttentionPlan,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The backend's one or other form."""
        scale = self.dim**-0.5
        if self.value_dim:
            return backend.attend_latent(query, kv, 0, plan, scale, self.value_dim)
        return backend.attend(query, kv, 0, plan, scale, window, sinks)


def check_reference(
    device: torch.device, geometry: Geometry, dtype: torch.dtype, page_size: int, *, seed: int, most: int = 3
) -> None:
    """Random batches of every kind of row; GQA with a window and sinks too."""
    backend, reference = TritonAttention(), TorchAttention()
    segments = random_batch(random.Random(seed), page_size, 300, "lcdtv", most)
    kv = filled_pool(geometry.kind, geometry.kv_heads, geometry.dim, page_size, 300, dtype, str(device))
    batch = ForwardBatch.build(segments, device)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_rows(segments), geometry.heads, geometry.dim, generator=generator).to(device, dtype)
    sinks = torch.randn(geometry.heads, generator=generator).to(device)
    for window, sink in ((0, None), (7, sinks))[: 1 if geometry.value_dim else 2]:
        found = geometry.attend(backend, query, kv, backend.plan(batch), window, sink)
        expected = geometry.attend(reference, query, kv, reference.plan(batch), window, sink)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])


@dataclass(frozen=True)
class Content:
    """One sequence: queries [length, heads, dim], what the pool keeps of each position, sinks."""

    geometry: Geometry
    query: torch.Tensor
    kept: tuple[torch.Tensor, ...]  # key and value [length, kv_heads, dim], or latent rows [length, dim]
    sinks: torch.Tensor | None

    @classmethod
    def random(
        cls, device: torch.device, geometry: Geometry, dtype: torch.dtype, length: int, *, sinks: bool = False
    ) -> Content:
        """The same numbers on every device."""
        generator = torch.Generator().manual_seed(length)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        dim = geometry.dim
        kept = [(length, dim)] if geometry.value_dim else [(length, geometry.kv_heads, dim)] * 2
        query, rows = numbers(length, geometry.heads, dim), tuple(numbers(*shape) for shape in kept)
        return cls(geometry, query, rows, numbers(geometry.heads).float() if sinks else None)

    @property
    def length(self) -> int:
        """Positions."""
        return self.query.shape[0]

    def shard(self, rank: int, degree: int) -> Content:
        """What a rank of ``degree`` holds of a GQA layer."""
        g = self.geometry
        heads, kv_heads = g.heads // degree, g.kv_heads // degree
        mine, kept = slice(rank * heads, (rank + 1) * heads), slice(rank * kv_heads, (rank + 1) * kv_heads)
        sinks = None if self.sinks is None else self.sinks[mine].contiguous()
        return Content(
            Geometry(heads, kv_heads, g.dim), self.query[:, mine], tuple(part[:, kept] for part in self.kept), sinks
        )


class Placed:
    """Content in a pool, scattered over its pages."""

    def __init__(self, content: Content, page_size: int = PAGE, seed: int = 1) -> None:
        g, device = content.geometry, content.query.device
        self.content, self.backend = content, TritonAttention()
        pages = 2 * (-(-content.length // page_size) + 8)
        self.scratch = Scratch(pages, page_size)
        layer = KvLayer(g.kind, LayerOwner.TARGET, g.kv_heads, g.dim)
        self.kv = KvPool(KvLayout((layer,), content.query.dtype), pages + 1, page_size, device)
        for data in self.kv.data:
            data.fill_(torch.nan)
            data[pages:] = 0.0
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.slots = (order[:, None] * page_size + torch.arange(page_size)).flatten().to(torch.int32)
        self.write(self.slots[: content.length], content.kept)

    def write(self, slots: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Into the pool."""
        write_rows(self.kv, 0, slots.long().to(self.kv.device), *parts)

    def run(self, segments: Sequence[Segment], query: torch.Tensor, window: int) -> torch.Tensor:
        """Rows of ``segments``."""
        plan = self.backend.plan(ForwardBatch.build(segments, self.kv.device))
        return self.content.geometry.attend(self.backend, query, self.kv, plan, window, self.content.sinks)

    def rows(self, *ranges: tuple[int, int], window: int = 0) -> torch.Tensor:
        """Rows start..end-1 of each range, a segment each, one forward."""
        query = torch.cat([self.content.query[start:end] for start, end in ranges])
        return self.run([self.line(start, end) for start, end in ranges], query, window)

    def line(self, start: int, end: int) -> Segment:
        """Rows start..end-1."""
        return Segment.linear([1] * (end - start), start, self.slots)

    def tree(self, start: int) -> tuple[Segment, torch.Tensor]:
        """A tree whose PATH has the sequence's rows from ``start`` on, and its queries. The strangers' keys and values
        are not finite."""
        content, segment = self.content, Segment.tree([1] * len(PARENTS), PARENTS, start, self.slots)
        query = torch.full_like(content.query[: len(PARENTS)], 3.0)
        kept = [torch.full_like(part[: len(PARENTS)], torch.nan) for part in content.kept]
        for depth, node in enumerate(PATH):
            query[node] = content.query[start + depth]
            for mine, part in zip(kept, content.kept, strict=True):
                mine[node] = part[start + depth]
        self.write(torch.tensor(segment.write_slots), kept)
        return segment, query


@dataclass(frozen=True)
class Bits:
    """Whether a row has its bits wherever it stands. split: positions of a split."""

    content: Content
    split: int
    window: int = 0

    @cached_property
    def whole(self) -> torch.Tensor:
        """All rows, as one prompt."""
        return Placed(self.content).rows((0, self.content.length), window=self.window)

    def check_batches(self) -> None:
        """A prompt's rows, alone, in chains, beside other sequences, in other pages."""
        length, split, whole = self.content.length, self.split, self.whole
        assert bool(whole.isfinite().all())
        home = Placed(self.content)
        for at in (split - 1, length - 1):
            self._same(home.rows((at, at + 1), window=self.window), slice(at, at + 1))
        for page_size, seed in ((1, 2), (16, 3)):
            other = Placed(self.content, page_size, seed)
            ranges = ((length - 1, length), (split - 2, split + 3), (0, 3))
            found, at = other.rows(*ranges, window=self.window), 0
            for start, end in ranges:
                self._same(found[at : at + end - start], slice(start, end))
                at += end - start

    def check_trees(self, *starts: int) -> None:
        """Nodes behind siblings, beside a chain. starts: the roots' positions; none: before borders of splits and
        blocks, and 0."""
        for start in starts or (0, self.split - 3, self.split + self.split // 2 - 1):
            placed = Placed(self.content)
            before = slice(max(start - 1, 0), max(start, 1))
            segment, query = placed.tree(start)
            segments = [segment, placed.line(before.start, before.stop)] if start else [segment]
            query = torch.cat((query, self.content.query[before])) if start else query
            found = placed.run(segments, query, self.window)
            self._same(found[list(PATH)], slice(start, start + len(PATH)))
            if start:
                self._same(found[len(PARENTS) :], before)

    def check_static(self) -> None:
        """A tree and a chain, padded, through one plan for graphs."""
        length, split = self.content.length, self.split
        placed = Placed(self.content)
        shape = StaticShape(requests=2, rows=len(PARENTS) + 1, tree=True, max_len=length + 40)
        plan = placed.backend.static_plan(shape, placed.kv)
        for start, end in ((length - 3, length), (split - 2, split + 3)):
            if end < length:
                tree, tree_query = placed.tree(split + 5)
                segments, query = [tree, placed.line(start, end)], tree_query
            else:
                segments, query = [placed.line(start, end)], self.content.query[:0]
            query = torch.cat((query, self.content.query[start:end]))
            places = torch.from_numpy(real_rows(segments, shape.rows)).to(query.device)
            padded = query.new_zeros(shape.num_rows, *query.shape[1:])
            padded[places] = query
            plan.fill(pad_segments(segments, shape, placed.scratch))
            found = self.content.geometry.attend(
                placed.backend, padded, placed.kv, plan, self.window, self.content.sinks
            )
            self._same(found[places][-(end - start) :], slice(start, end))
            if end < length:
                self._same(found[places][list(PATH)], slice(split + 5, split + 5 + len(PATH)))

    def check_derived(self) -> None:
        """Chains through one plan for graphs that works batches out from the tables on the device. Mutants: rows see
        one position less; a table's columns are counted in tables."""
        length, rows = self.content.length, 3
        placed = Placed(self.content)
        tables = ResidentTables(3, length, placed.scratch, self.content.query.device)
        shape = StaticShape(requests=3, rows=rows, tree=False, max_len=length)
        forward = StaticForward.make(shape, placed.backend, Room(placed.kv, placed.scratch, tables))
        assert forward is not None
        assert forward.follows
        for spans in (((1, 4), (self.split - 1, self.split + 2)), ((length - 2, length), (0, 1), (2, 3))):
            # Sequences have lists of slots of their own, and are known by them.
            segments = [Segment.linear([1] * (end - start), start, placed.slots.clone()) for start, end in spans]
            forward.fill(segments)
            forward.derive()
            query = torch.cat([self.content.query[start:end] for start, end in spans])
            places = torch.from_numpy(real_rows(segments, rows)).to(query.device)
            padded = query.new_zeros(shape.num_rows, *query.shape[1:])
            padded[places] = query
            found = self.content.geometry.attend(
                placed.backend, padded, placed.kv, forward.context.plan, self.window, self.content.sinks
            )
            for (start, end), own in zip(spans, torch.split(found[places], [e - s for s, e in spans]), strict=True):
                self._same(own, slice(start, end))

    def check_parts(self) -> None:
        """Splits merged in registers, and rows taken in turns, as where memory is short."""
        with mock.patch.object(triton_paged, "WORKSPACE_BYTES", 0):
            again = Placed(self.content).rows((0, self.content.length), window=self.window)
        assert torch.equal(again, self.whole)

    def check_shards(self, degree: int) -> None:
        """The heads that each of ``degree`` ranks holds."""
        length = self.content.length
        heads = self.content.geometry.heads // degree
        for rank in range(degree):
            found = Placed(self.content.shard(rank, degree)).rows((length - 2, length), window=self.window)
            assert torch.equal(found, self.whole[-2:, rank * heads : (rank + 1) * heads])

    def _same(self, rows: torch.Tensor, which: slice) -> None:
        assert torch.equal(rows, self.whole[which]), which
