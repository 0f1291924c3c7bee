"""Attention by Triton kernels of our own: on CUDA, and in Triton's interpreter.

It serves every kind of row (decode, chains, prompts, trees), GQA and MLA, float32 and 16-bit, windows and sinks, with
one kernel for all of them, whose bits belong to the row alone (``triton_kernels.py``).

Programs leave float32 sums in memory, ``value_dim + 2`` numbers for each head of a row and each part of its positions.
A part is one split as long as all sums of the batch fit WORKSPACE_BYTES, so that one row of a long context keeps the
whole GPU busy. Else it is all splits of the row, merged in registers, and more rows than fit are taken in turn: a
prompt of any length takes no more. Both have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch, StaticPlan, StaticShape
from paceline.attention.triton_kernels import TILE, _attend_kernel, _finish_kernel
from paceline.attention.triton_plan import StaticTritonPlan, TritonPlan
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import Int32
from paceline.triton_support import EXACT, next_power_of_2, on_device_of

SPLIT = 256  # positions, from position 0 on
MAX_BLOCK = 64  # positions
TILE_BYTES = 64 << 10  # of the keys and values of a block
WORKSPACE_BYTES = 128 << 20
FINISHED_ELEMENTS = 512  # that one program merges parts of
AHEAD = 4  # parts that it loads at once
PROGRAMS = 2048  # enough for every GPU; more of them would only find that rows are short
LOG2E = 1.4426950408889634
ALL = 2**30  # splits
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Geometry:
    """What the kernels are compiled for. Blocks follow from widths and dtype: bits may depend on these alone."""

    group: int  # query heads of a KV head
    key_dim: int  # of MLA: the part of a row that is also its value
    rope_dim: int  # of MLA: what follows in the row; 0 for GQA
    value_dim: int
    itemsize: int

    @property
    def latent(self) -> bool:
        """MLA."""
        return self.rope_dim > 0

    @property
    def tokens(self) -> int:
        """Batch rows of a tile."""
        return max(TILE // self.group, 1)

    @property
    def head_tiles(self) -> int:
        """Tiles that one row's group of heads takes."""
        return -(-self.group // TILE)

    @cached_property
    def block(self) -> int:
        """Positions of a block."""
        block = min(MAX_BLOCK, SPLIT)
        while block > TILE and block * self._position_bytes > TILE_BYTES:
            block //= 2
        return block

    @property
    def _position_bytes(self) -> int:
        values = 0 if self.latent else _padded(self.value_dim)
        return (_padded(self.key_dim) + values + (_padded(self.rope_dim) if self.latent else 0)) * self.itemsize

    @cached_property
    def options(self) -> dict[str, Any]:
        """Constants and launch options of ``_attend_kernel``."""
        narrow = 2 * self.block * self._position_bytes <= TILE_BYTES
        return {
            "GROUP": self.group,
            "KEY": self.key_dim,
            "BLOCK_KEY": _padded(self.key_dim),
            "ROPE": self.rope_dim,
            "BLOCK_ROPE": _padded(self.rope_dim) if self.latent else TILE,
            "VALUE": self.value_dim,
            "BLOCK_VALUE": _padded(self.value_dim),
            "LATENT": self.latent,
            "BLOCK": self.block,
            "SPLIT": SPLIT,
            "EVEN": self.even,
            # With few warps and blocks on their way a multiprocessor has several programs, which wait by turns.
            "num_warps": 2 if narrow else 8 if self.value_dim * self.itemsize > 512 else 4,
            "num_stages": 2 if narrow else 3,
            **EXACT,
        }

    @cached_property
    def even(self) -> int:
        """A number of elements that every stride is a multiple of."""
        width, even = self.key_dim + self.rope_dim, VECTOR_BYTES // self.itemsize
        while width % even:
            even //= 2
        return even

    def partial_bytes(self, rows: int, heads: int) -> int:
        """Bytes of the sums of one part."""
        return 4 * rows * heads * (self.value_dim + 2)


def _padded(width: int) -> int:
    return max(next_power_of_2(width), TILE)


class TritonAttention(AttentionBackend):
    """See the module."""

    name = "triton"
    row_invariant = True

    @property
    def kernels(self) -> str:
        """See AttentionBackend."""
        return f"{self.name} {triton.__version__}"

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """See AttentionBackend."""
        return TritonPlan(batch.segments, batch.token_ids.device)

    def static_plan(self, shape: StaticShape, kv: KvPool) -> StaticPlan:
        """See AttentionBackend."""
        return StaticTritonPlan(shape, kv)

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
        assert isinstance(plan, TritonPlan)
        pages = kv.data[layer]
        heads, dim = query.shape[1:]
        geometry = Geometry(heads // pages.shape[3], dim, 0, dim, query.element_size())
        return _Launch(query, pages, plan, geometry, scale, window, sinks).run()

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, TritonPlan)
        heads, dim = query.shape[1:]
        geometry = Geometry(heads, value_dim, dim - value_dim, value_dim, query.element_size())
        pages = kv.data[layer][:, None, :, None]  # as one KV head
        return _Launch(query, pages, plan, geometry, scale, 0, None).run()


class _Launch:
    """One call of attention. pages: [pages, 1 or 2, page_size, kv_heads, dim]."""

    def __init__(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        plan: TritonPlan,
        geometry: Geometry,
        scale: float,
        window: int,
        sinks: torch.Tensor | None,
    ) -> None:
        self.query, self.pages, self.plan, self.geometry = query.contiguous(), pages, plan, geometry
        self.scale, self.window, self.sinks = scale * LOG2E, window, sinks
        self.rows, self.table, longest = plan.reads(pages.shape[2])
        self.heads = query.shape[1]
        splits = max(-(-longest // SPLIT), 1)
        apart = geometry.partial_bytes(query.shape[0] * splits, self.heads) <= WORKSPACE_BYTES
        self.parts, self.span = (splits, 1) if apart else (1, ALL)

    def run(self) -> torch.Tensor:
        """[T, heads, value_dim]."""
        out = self.query.new_empty(*self.query.shape[:2], self.geometry.value_dim)
        host, tiles = self.plan.tiles(self.geometry.tokens)
        with on_device_of(self.query):
            for first, end in self._turns(host):
                base = int(host[first, 0])
                self._turn(out, tiles, range(first, end), range(base, int(host[end - 1].sum())))
        return out

    def _turns(self, tiles: Int32) -> Iterator[tuple[int, int]]:
        """Runs of tiles whose sums fit the workspace."""
        most = max(WORKSPACE_BYTES // self.geometry.partial_bytes(self.parts, self.heads), TILE)
        ends, first = tiles.sum(axis=1), 0
        while first < len(tiles):
            end = int(ends.searchsorted(tiles[first, 0] + most, side="right"))
            yield first, end
            first = end

    def _turn(self, out: torch.Tensor, tiles: torch.Tensor, which: range, rows: range) -> None:
        geometry, query, pages = self.geometry, self.query, self.pages
        accs = query.new_empty(self.parts, len(rows), self.heads, geometry.value_dim, dtype=torch.float32)
        sums = query.new_empty(2, self.parts, len(rows), self.heads, dtype=torch.float32)
        page_stride, part_stride, slot_stride, head_stride, _ = (s // geometry.even for s in pages.stride())
        tiled = len(which), pages.shape[3] * geometry.head_tiles
        _attend_kernel[(*tiled, min(max(PROGRAMS // (tiled[0] * tiled[1]), 1), self.parts))](
            query, pages, self.table, self.rows, tiles, accs, sums, self.rows.shape[1], which.start, rows.start,
            len(rows), self.heads, query.stride(0) // geometry.even, query.stride(1) // geometry.even, pages.shape[2],
            page_stride, part_stride, slot_stride, head_stride, self.parts, self.span, self.window,
            self.scale,
            **geometry.options,
        )  # fmt: skip
        items = max(FINISHED_ELEMENTS // _padded(geometry.value_dim), 1)
        _finish_kernel[(triton.cdiv(len(rows) * self.heads, items),)](
            accs, sums, self.rows, self.sinks, out, self.rows.shape[1], rows.start, len(rows), self.heads, self.parts,
            self.span, self.window, VALUE=geometry.value_dim, BLOCK_VALUE=_padded(geometry.value_dim), SPLIT=SPLIT,
            ITEMS=items, AHEAD=AHEAD, **EXACT,
        )  # fmt: skip
