"""Rows between a CPU pool and flat memory in one call, layers and all.

Not for the copying alone: a loop over layers takes the interpreter lock back after each of them, and stands in line for
it behind an engine that computes. The torch loops in rows.py are the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kvcache.layout import LayerKind
from paceline.kvcache.pool import KvPool
from paceline.layers.build import load_kernels


@dataclass(frozen=True)
class Columns:
    """The heads of a slice in one layer of a pool: a strided view of its memory, [rows, width]."""

    kind: LayerKind
    view: Tensor
    width: int


class HostRows:
    """Columns of one pool on the CPU. ``columns``: by layer; the others do not cross."""

    def __init__(self, library: ctypes.CDLL, pool: KvPool, columns: Mapping[int, Columns]) -> None:
        self._library = library
        self._page_size = pool.page_size
        self._num_slots = pool.num_pages * pool.page_size
        self._columns = dict(columns)  # keeps the memory alive that the table points to
        self._table = torch.zeros(len(pool.layout.layers), 4, dtype=torch.int64)
        for layer, part in columns.items():
            size = part.view.element_size()
            parts = 1 if part.kind is LayerKind.MLA else 2
            row = (part.view.data_ptr(), part.width * size, part.view.stride(0) * size, parts)
            self._table[layer] = torch.tensor(row)
        self._rows_at, self._row_bytes = self._table.data_ptr(), self._table.stride(0) * self._table.itemsize

    def gather(self, layers: range, slots: Tensor, flat: Tensor) -> None:
        """Fill ``flat``, contiguous, with the rows of ``layers`` at ``slots`` [T]. IndexError when one is outside."""
        self._move(layers, slots, flat, to_pool=0)

    def scatter(self, layers: range, slots: Tensor, flat: Tensor) -> None:
        """Store the rows that ``flat``, contiguous, holds. IndexError when a slot is outside."""
        self._move(layers, slots, flat, to_pool=1)

    def _move(self, layers: range, slots: Tensor, flat: Tensor, to_pool: int) -> None:
        if slots.dtype is not torch.int64 or slots.device.type != "cpu" or not slots.is_contiguous():
            slots = slots.to(device="cpu", dtype=torch.int64).contiguous()
        table = self._rows_at + layers.start * self._row_bytes
        rows = (slots.data_ptr(), slots.shape[0], self._num_slots)
        if self._library.pl_move_rows(table, len(layers), *rows, self._page_size, flat.data_ptr(), to_pool):
            lowest, highest = (int(bound) for bound in torch.aminmax(slots))
            raise IndexError(f"slots {lowest} to {highest} are not inside a pool of {self._num_slots}")


def make_host_rows(pool: KvPool, columns: Mapping[int, Columns]) -> HostRows | None:
    """None where torch moves the rows: on a GPU, or without the kernels."""
    library = load_kernels() if pool.device.type == "cpu" else None
    return None if library is None else HostRows(library, pool, columns)
