"""The weights of a GGUF file without memory, for a dry run: named, shaped and quantised as GgufTensors has them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.announced import Announced
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.gguf.tensors import GgufTensors
from paceline.models.weight_files import gguf_file

META = torch.device("meta")


class PlannedGguf(GgufTensors):
    """See GgufTensors; only the header of the file is read."""

    def __getitem__(self, name: str) -> LinearWeight:
        place = self._places[name]
        if not self._in_codes(place):
            return torch.empty(place.shape, dtype=self.dtype_of(name), device=META)
        self._order(place.tensor)  # which may be refused
        rows, columns = place.shape
        return planned_weight(place.tensor.kind, rows, columns)

    def announced(self) -> dict[str, Announced]:
        """What there is, by GGUF's names of types."""
        return {name: Announced(place.shape, place.tensor.kind.name) for name, place in self._places.items()}


def open_planned(folder: Path, dtype: torch.dtype) -> PlannedGguf:
    """The weights of a folder with a GGUF file. Raises ConfigError, see GgufTensors."""
    file = gguf_file(folder)
    assert file is not None
    return PlannedGguf(GgufFile(file), dtype)


@cache
def planned_weight(kind: GGMLQuantizationType, rows: int, columns: int) -> QuantizedWeight:
    """A matrix of a type in IN_CODES: as many rows as asked for, like one of zeros."""
    size, width = GGML_QUANT_SIZES[kind]
    row = weight_of_blocks(np.zeros((1, columns // size * width), np.uint8), kind)

    def high(one: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows, one.shape[1], dtype=one.dtype, device=META)

    return replace(
        row,
        codes=high(row.codes),
        scales=high(row.scales),
        minimums=None if row.minimums is None else high(row.minimums),
        tables=None if row.tables is None else row.tables.mapped(high),
    )
