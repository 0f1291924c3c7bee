"""Where the layers of a pool lie, for kernels that move rows of many layers in one launch.

Rows move as units of up to 8 bytes, so that one kernel serves every dtype, two units at a time where all widths and
addresses allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.kvcache.layout import KvLayout, LayerKind

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class UnitTable:
    """The memory of one pool in units. Layers are named by their index in the pool."""

    flats: Sequence[torch.Tensor]  # ``KvPool``'s rows of a part; they keep the addresses below alive
    dtype: torch.dtype  # of the pool
    unit: torch.dtype  # integer
    even: int  # units that every width and address is a multiple of: 1 or 2
    page_size: int
    num_slots: int
    first: torch.Tensor  # the first layer's memory, in units
    widths: list[int]  # of a part of each layer's row (K, V or latent)
    row_units: list[int]  # of a whole row of each layer
    # int64 [layers, 4] on the device: distance from the first layer's memory to its own, width of a part, parts (K and
    # V, or one), width of the layers before.
    table: torch.Tensor

    @classmethod
    def of(cls, flats: Sequence[torch.Tensor], layout: KvLayout, page_size: int) -> UnitTable:
        """flats: of each layer, rows of a part; K's come before V's in a page."""
        parts = [1 if layer.kind is LayerKind.MLA else 2 for layer in layout.layers]
        sizes = [flat.shape[1] * flat.element_size() for flat in flats]
        unit_bytes = max(size for size in _UNITS if all(width % size == 0 for width in sizes))
        even = 2 if unit_bytes == 8 and all(width % 16 == 0 for width in sizes) else 1
        if any(flat.data_ptr() % (even * unit_bytes) for flat in flats):
            even = 1
        widths = [size // unit_bytes for size in sizes]
        row_units = [width * part for width, part in zip(widths, parts, strict=True)]
        rows, before = [], 0
        for flat, width, part, units in zip(flats, widths, parts, row_units, strict=True):
            rows.append(((flat.data_ptr() - flats[0].data_ptr()) // unit_bytes, width, part, before))
            before += units
        unit = _UNITS[unit_bytes]
        return cls(
            flats, layout.dtype, unit, even, page_size, flats[0].shape[0] // parts[0], flats[0].view(unit), widths,
            row_units, torch.tensor(rows, dtype=torch.int64, device=flats[0].device),
        )  # fmt: skip
