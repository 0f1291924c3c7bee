"""Between the pool of one rank and the wire: the slices of a reshard plan, gathered at the source and scattered at the
destination.

Flat canonical order: layer, token, then K heads, then V heads of the slice. Where two ranks hold the same heads, that
is what `KvPool.gather` gives and `KvPool.scatter` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kv_transfer.layout.host_rows import Columns, make_host_rows
from kv_transfer.layout.reshard import ReshardPlan, Side
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout, LayerKind
from paceline.kvcache.pool import KvPool


class RowSource:
    """A pool's rows as ``plan`` sends them. ``pool`` holds what ``plan.source`` says; ConfigError naming ``layout``
    when it does not."""

    def __init__(self, pool: KvPool, plan: ReshardPlan) -> None:
        _check_pool(pool, plan.source)
        self.plan = plan
        self._pool = pool
        self._at_once = _moves_whole_rows(pool, plan)
        self._as_it_is = self.dtype is pool.layout.dtype and not self._at_once
        slices = () if self._at_once else plan.slices
        self._columns = _columns(pool, {part.layer: (part.source_head, part.num_heads) for part in slices})
        self._host = make_host_rows(pool, self._columns)
        self._widths = _Widths(plan.wire)

    @property
    def dtype(self) -> torch.dtype:
        """The destination's: what KV rows cross as."""
        return self.plan.wire.dtype

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The destination's: what hidden rows cross as."""
        return self.plan.wire.hidden_dtype

    def token_bytes(self, layers: range) -> int:
        """Bytes of one token over ``layers`` on the wire."""
        return self._widths.of_token(layers) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self._pool.device

    def gather(self, layers: range, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of ``layers`` at ``slots`` [T], which are in order of position: flat, contiguous, of ``dtype``, on the
        pool's device. float32 rows that become bfloat16 are rounded to nearest even, as ``Tensor.to`` does.

        out: filled and returned instead; of that size and dtype, on any device. ValueError when it is not.
        """
        num_elems = self._widths.of_rows(layers, slots)
        if out is not None and (out.shape != (num_elems,) or out.dtype is not self.dtype):
            raise ValueError(f"{out.dtype} {list(out.shape)} is no room for {self.dtype} {[num_elems]}")
        if out is not None and self._as_it_is and out.device == self._pool.device:
            self._fill(out, layers, slots)
            return out
        rows = self._gather_new(layers, slots, num_elems)
        return rows.to(self.dtype) if out is None else out.copy_(rows)

    def _gather_new(self, layers: range, slots: Tensor, num_elems: int) -> Tensor:
        """The rows in new memory, of the pool's dtype."""
        if self._at_once:
            return self._pool.gather(layers, slots)
        result = torch.empty(num_elems, dtype=self._pool.layout.dtype, device=self._pool.device)
        self._fill(result, layers, slots)
        return result

    def _fill(self, result: Tensor, layers: range, slots: Tensor) -> None:
        if self._host is not None:
            self._host.gather(layers, slots, result)
            return
        rows = _Rows.of(slots, self._pool)
        for layer, part in zip(layers, torch.split(result, self._widths.sizes(layers, slots)), strict=True):
            if columns := self._columns.get(layer):
                torch.index_select(columns.view, 0, rows.of_kind(columns.kind), out=part.view(-1, columns.width))


class RowTarget:
    """Where ``plan`` puts rows that arrived. ``pool`` holds what ``plan.dest`` says; ConfigError naming ``layout``
    when it does not."""

    def __init__(self, pool: KvPool, plan: ReshardPlan) -> None:
        _check_pool(pool, plan.dest)
        self.plan = plan
        self._pool = pool
        self._at_once = _moves_whole_rows(pool, plan)
        slices = () if self._at_once else plan.slices
        self._columns = _columns(pool, {part.layer: (part.dest_head, part.num_heads) for part in slices})
        self._host = make_host_rows(pool, self._columns)
        self._widths = _Widths(plan.wire)

    def scatter(self, layers: range, slots: Tensor, data: Tensor) -> None:
        """Inverse of `RowSource.gather`: store flat ``data`` of ``layers`` at ``slots`` [T]. The heads that other
        sources send keep their content. ValueError when ``data`` has another size or dtype."""
        if self._at_once:
            self._pool.scatter(layers, slots, data)
            return
        num_elems = self._widths.of_rows(layers, slots)
        if data.shape != (num_elems,) or data.dtype is not self.plan.wire.dtype:
            raise ValueError(
                f"{data.dtype} {list(data.shape)} arrived for {slots.shape[0]} tokens of layers {layers}, "
                f"expected {self.plan.wire.dtype} {[num_elems]}"
            )
        data = data.to(self._pool.device).contiguous()
        if self._host is not None:
            self._host.scatter(layers, slots, data)
            return
        rows = _Rows.of(slots, self._pool)
        for layer, part in zip(layers, torch.split(data, self._widths.sizes(layers, slots)), strict=True):
            if columns := self._columns.get(layer):
                columns.view.index_copy_(0, rows.of_kind(columns.kind), part.view(-1, columns.width))


def _columns(pool: KvPool, slices: dict[int, tuple[int, int]]) -> dict[int, Columns]:
    """The columns by layer, for slices given as (first head, number of heads) by layer."""
    found = {}
    for index, (first, count) in slices.items():
        layer = pool.layout.layers[index]
        heads = 1 if layer.kind is LayerKind.MLA else layer.num_kv_heads
        flat = pool.data[index].view(-1, heads * layer.head_dim)
        width = count * layer.head_dim
        found[index] = Columns(layer.kind, flat.narrow(1, first * layer.head_dim, width), width)
    return found


@dataclass(frozen=True)
class _Rows:
    """The rows of some slots in the flat view of a layer: [T] (MLA), or [2 * T], K V K V, of a page that holds K of all
    its tokens, then V."""

    latent: Tensor
    keys_and_values: Tensor

    @classmethod
    def of(cls, slots: Tensor, pool: KvPool) -> _Rows:
        slots = slots.to(device=pool.device, dtype=torch.int64)
        keys = slots + torch.div(slots, pool.page_size, rounding_mode="floor") * pool.page_size
        return cls(slots, torch.stack((keys, keys + pool.page_size), dim=1).view(-1))

    def of_kind(self, kind: LayerKind) -> Tensor:
        return self.latent if kind is LayerKind.MLA else self.keys_and_values


class _Widths:
    """Elements that a token has in the layers of a wire layout, added up once."""

    def __init__(self, wire: KvLayout) -> None:
        self._before = list(accumulate((layer.row_elems for layer in wire.layers), initial=0))

    def of_token(self, layers: range) -> int:
        """Elements of one token. ValueError when there are no such layers."""
        if layers and not 0 <= layers.start < layers.stop < len(self._before):
            raise ValueError(f"layers {layers} are outside a pool of {len(self._before) - 1} layers")
        return self._before[layers.stop] - self._before[layers.start] if layers else 0

    def of_rows(self, layers: range, slots: Tensor) -> int:
        """Elements of all slots."""
        return self.of_token(layers) * slots.shape[0]

    def sizes(self, layers: range, slots: Tensor) -> list[int]:
        """Elements of all slots in each layer."""
        return [(self._before[layer + 1] - self._before[layer]) * slots.shape[0] for layer in layers]


def _moves_whole_rows(pool: KvPool, plan: ReshardPlan) -> bool:
    """Whether the pool itself moves the rows: one on a GPU does all layers in one launch, and one that several ranks
    hold asks them. ConfigError naming ``layout`` where such a pool is to move a part of its rows."""
    whole = plan.wire.layers == pool.layout.layers
    if not (whole or pool.alone):
        raise ConfigError("layout", f"a pool of several ranks moves whole rows, not {plan.wire.text()}")
    return whole and (pool.device.type != "cpu" or not pool.alone)


def _check_pool(pool: KvPool, side: Side) -> None:
    if pool.layout != side.local:
        raise ConfigError(
            "layout",
            f"the pool holds {pool.layout.text()}, rank {side.rank} of {side.degree} needs {side.local.text()}",
        )
