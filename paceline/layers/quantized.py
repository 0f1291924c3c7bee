"""Weights of linear layers as codes with scales: what checkpoints and ``--quantize`` give to ``Linear``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.layers.file_tables import FileTables, fused_tables

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1: the numbers of its three lower bits; the fourth is the sign
ROUNDED_TOGETHER = 64  # elements of a row of x that share a scale where the weight has one scale a row


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out_features, in_features]; element (n, k) is scales[n, g] * codes[n, k] + minimums[n, g], where
    g = k // group_size.

    codes: int8 [out_features, in_features], -8 to 7 where ``bits`` is 4, -32 to 31 where it is 6; or float8_e4m3fn.
    Where ``float4``, the number that the four bits of code + 8 are in FLOAT4 stands for the code.
    scales: float32 [out_features, ceil(in_features / group_size)].
    minimums: float32, shaped as scales; None where all are 0.
    bits: 4, 6 or 8, of a code.
    group_size: elements of a row that share a scale; in_features for one scale a row.
    int8_activations: whether products are made of integers: the input is rounded to int8, ``rounded_together``
    elements of a row with one scale.
    grouped: whether scales are of groups even where a row has a single one, as some columns of a weight may have.
    tables: what the scales and minimums are made of, where that takes fewer bytes; None where nothing does.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    group_size: int
    int8_activations: bool
    grouped: bool = False
    tables: FileTables | None = None
    float4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Its size: (out_features, in_features)."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    @property
    def has_row_scales(self) -> bool:
        """Whether one scale holds for a whole row, and there is nothing to add."""
        return self.scales.shape[1] == 1 and self.minimums is None and not self.grouped

    @property
    def rounded_together(self) -> int:
        """Elements of a row of the input that share a scale in products of integers: those of a group. With one scale a
        row, its few large elements would leave too few codes to the others (docs/guides/quantised.md)."""
        return min(self.shape[1], ROUNDED_TOGETHER if self.has_row_scales else self.group_size)

    @property
    def kept_together(self) -> int:
        """Elements of a row that no slab and no rank may part: those of a group, of the weight or of the input."""
        if self.int8_activations:
            return self.rounded_together
        return 1 if self.has_row_scales else min(self.shape[1], self.group_size)

    def dequantised(self) -> torch.Tensor:
        """The weight as float32 [out_features, in_features]."""
        if self.codes.is_meta:  # a dry run, of many thousands
            return self.codes.new_empty(self.shape, dtype=torch.float32)
        columns = torch.arange(self.shape[1], device=self.codes.device) // self.group_size
        weight = self.numbers() * self.scales[:, columns]
        return weight if self.minimums is None else weight + self.minimums[:, columns]

    def numbers(self) -> torch.Tensor:
        """What the codes stand for before they are scaled, float32 [out_features, in_features]."""
        if not self.float4:
            return self.codes.float()
        values = torch.tensor([*FLOAT4, *(-value for value in FLOAT4)], device=self.codes.device)
        return values[self.codes.int() + 8]

    def copied(self) -> QuantizedWeight:
        """The same in memory of its own, so that what it is a part of can go."""
        minimums = None if self.minimums is None else self.minimums.clone()
        codes = self.codes.clone(memory_format=torch.contiguous_format)
        tables = None if self.tables is None else self.tables.mapped(torch.clone)
        return replace(self, codes=codes, scales=self.scales.clone(), minimums=minimums, tables=tables)

    def rows(self, low: int, high: int) -> QuantizedWeight:
        """Output features [low, high)."""
        return self.of_rows(slice(low, high))

    def of_rows(self, rows: slice | torch.Tensor) -> QuantizedWeight:
        """Some output features, or all in another order. rows: their places, int64."""
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)  # float8 has no order of its own
        minimums = None if self.minimums is None else self.minimums[rows]
        tables = None if self.tables is None else self.tables.mapped(lambda table: table[rows])
        return replace(self, codes=codes, scales=self.scales[rows], minimums=minimums, tables=tables)

    def columns(self, low: int, high: int) -> QuantizedWeight:
        """Input features [low, high), which part no group: see ``kept_together``."""
        codes = self.codes[:, low:high]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group_size=self.group_size if self.grouped else high - low)
        groups = slice(low // self.group_size, -(-high // self.group_size))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        tables = None if self.tables is None else self.tables.columns(groups.start, groups.stop)
        return replace(self, codes=codes, scales=self.scales[:, groups], minimums=minimums, grouped=True, tables=tables)


LinearWeight = torch.Tensor | QuantizedWeight  # what a linear layer is made of: [out_features, in_features]


def fuse(weights: Sequence[LinearWeight]) -> LinearWeight:
    """One weight whose output is the outputs of ``weights`` side by side. Raises ValueError when they are of unlike
    kinds."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(tensors) == len(weights):
        return torch.cat(tensors, dim=0)
    parts = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    kinds = {(part.bits, part.group_size, part.int8_activations, part.codes.dtype, part.float4) for part in parts}
    if tensors or len(kinds) > 1:
        raise ValueError("weights that are multiplied together are quantised in unlike ways")
    minimums = [torch.zeros_like(part.scales) if part.minimums is None else part.minimums for part in parts]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minimums=None if all(part.minimums is None for part in parts) else torch.cat(minimums),
        tables=fused_tables([part.tables for part in parts]),
    )
