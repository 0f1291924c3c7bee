"""Moving tokens in and out of the pool in one launch over many layers; ``KvPool``'s torch loops are the reference.

A table on the device says where each layer's memory lies and how wide its rows are. Rows move as units of up to 8
bytes, so that one kernel serves every dtype, two units at a time where all widths allow it; neighbouring threads move
neighbouring units of a row, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kvcache.layout import KvLayout, LayerKind
from paceline.triton_support import runs_triton

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# From the first layer's memory to its own, width of a part, parts (K and V, or one), width of the layers before: in
# units.
TABLE_WORDS = 4


class DevicePages:
    """Kernels over the layers of one pool. ``flats`` are ``KvPool``'s: rows of a part, K's before V's in a page."""

    def __init__(self, flats: Sequence[torch.Tensor], layout: KvLayout, page_size: int) -> None:
        parts = [1 if layer.kind is LayerKind.MLA else 2 for layer in layout.layers]
        widths = [flat.shape[1] * flat.element_size() for flat in flats]
        self.unit_bytes = max(size for size in _UNITS if all(width % size == 0 for width in widths))
        self.unit = _UNITS[self.unit_bytes]
        self.even = 2 if self.unit_bytes == 8 and all(width % 16 == 0 for width in widths) else 1
        if any(flat.data_ptr() % (self.even * self.unit_bytes) for flat in flats):
            self.even = 1
        self.page_size = page_size
        self.num_slots = flats[0].shape[0] // parts[0]
        self.dtype, self.device = layout.dtype, flats[0].device
        self._flats = flats  # keeps the addresses below alive
        self.first = flats[0].view(self.unit)
        self.widths = [width // self.unit_bytes for width in widths]
        self.units = [width * part // self.unit_bytes for width, part in zip(widths, parts, strict=True)]
        rows, before = [], 0
        for flat, width, part, units in zip(flats, widths, parts, self.units, strict=True):
            distance = (flat.data_ptr() - flats[0].data_ptr()) // self.unit_bytes
            rows.append((distance, width // self.unit_bytes, part, before))
            before += units
        self.table = torch.tensor(rows, dtype=torch.int64, device=self.device)  # [layers, TABLE_WORDS]

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """``KvPool.gather`` of checked arguments. slots: [T] on the device; one outside the pool reads nothing."""
        from paceline.kvcache.pages_triton import move

        units = sum(self.units[layer] for layer in layers) * slots.shape[0]
        result = torch.empty(units, dtype=self.unit, device=self.device)
        move(self, layers, slots, result, to_flat=True)
        return result.view(self.dtype)

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """``KvPool.scatter`` of checked arguments. data: flat, contiguous; a slot outside the pool writes nothing."""
        from paceline.kvcache.pages_triton import move

        if data.data_ptr() % self.unit_bytes:
            data = data.clone()
        move(self, layers, slots, data.view(torch.uint8).view(self.unit), to_flat=False)

    def compact(
        self, layers: range, slots: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, paths: torch.Tensor
    ) -> None:
        """``KvPool.keep_paths``."""
        from paceline.kvcache.pages_triton import compact

        compact(self, layers, slots, starts, lengths, paths)


def make_device_pages(flats: Sequence[torch.Tensor], layout: KvLayout, page_size: int) -> DevicePages | None:
    """None where torch moves the pages: on the CPU, and on CUDA without Triton."""
    if flats[0].device.type != "cuda" or not runs_triton(flats[0].device):
        return None
    return DevicePages(flats, layout, page_size)
