"""Moving tokens in and out of the pool in one launch over many layers; ``KvPool``'s torch loops are the reference.

Neighbouring threads move neighbouring units of a row, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kvcache.layout import KvLayout
from paceline.kvcache.unit_table import UnitTable
from paceline.triton_support import runs_triton


class DevicePages:
    """Kernels over the layers of one pool."""

    def __init__(self, units: UnitTable) -> None:
        self.units = units

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """``KvPool.gather`` of checked arguments. slots: [T] on the device; one outside the pool reads nothing."""
        from paceline.kvcache.pages_triton import move

        count = sum(self.units.row_units[layer] for layer in layers) * slots.shape[0]
        result = torch.empty(count, dtype=self.units.unit, device=self.units.table.device)
        move(self.units, layers, slots, result, to_flat=True)
        return result.view(self.units.dtype)

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """``KvPool.scatter`` of checked arguments. data: flat, contiguous; a slot outside the pool writes nothing."""
        from paceline.kvcache.pages_triton import move

        if data.data_ptr() % self.units.unit.itemsize:
            data = data.clone()
        move(self.units, layers, slots, data.view(torch.uint8).view(self.units.unit), to_flat=False)

    def compact(
        self, layers: range, slots: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, paths: torch.Tensor
    ) -> None:
        """``KvPool.keep_paths``."""
        from paceline.kvcache.pages_triton import compact

        compact(self.units, layers, slots, starts, lengths, paths)


def make_device_pages(flats: Sequence[torch.Tensor], layout: KvLayout, page_size: int) -> DevicePages | None:
    """None where torch moves the pages: on the CPU, and on CUDA without Triton. flats: see ``UnitTable.of``."""
    if flats[0].device.type != "cuda" or not runs_triton(flats[0].device):
        return None
    return DevicePages(UnitTable.of(flats, layout, page_size))
