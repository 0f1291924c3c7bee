"""Scales and minimums as GGUF and NVFP4 files hold them, in fewer bytes than their values take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

MIDDLE = 8  # how far above a group's lowest code, -8, its code 0 is


@dataclass(frozen=True)
class FileTables:
    """What the scale and the minimum of output n and group g of a QuantizedWeight are made of. r is g // span:

    scale = scales[n, g] * scale_steps[n, r];
    minimum = lowest[n, g] * lowest_steps[n, r] + MIDDLE * scale. Without steps there are no such factors.
    With numbers, scale = scales[n, g] * numbers[n], or scales[n, g] / numbers[n] where it ``divides``, rounded to
    float32; scales are then float8 numbers in float16, without a sign, and there is nothing else.

    scales, lowest: [out_features, groups], whole numbers in int8 where there are steps, else floats. lowest may be
    None: then there are no minimums.
    scale_steps, lowest_steps: float16 [out_features, ceil(groups / span)], or None.
    span: groups that share a step.
    numbers: float32 [out_features], or None.
    """

    scales: torch.Tensor
    lowest: torch.Tensor | None
    scale_steps: torch.Tensor | None = None
    lowest_steps: torch.Tensor | None = None
    span: int = 1
    numbers: torch.Tensor | None = None
    divides: bool = False

    def values(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and minimums, float32 [out_features, groups]."""
        if self.numbers is not None:
            wide, numbers = self.scales.float(), self.numbers.unsqueeze(1)
            return wide / numbers if self.divides else wide * numbers, None
        scales = self._stepped(self.scales, self.scale_steps)
        if self.lowest is None:
            return scales, None
        return scales, self._stepped(self.lowest, self.lowest_steps) + MIDDLE * scales

    def _stepped(self, table: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        if steps is None:
            return table.float()
        return table.float() * steps.float().repeat_interleave(self.span, dim=1)[:, : table.shape[1]]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for tables that can lie together."""
        return self.span, self.scale_steps is None, self.numbers is None, self.divides

    def are_numbers(self) -> bool:
        """Whether nothing is infinite or not a number, which kernels do not read alike."""
        found = (self.scales, self.lowest, self.scale_steps, self.lowest_steps)
        return all(_finite(table) for table in found if table is not None)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> FileTables:
        """With ``change`` done to each tensor, which leaves columns as they are."""
        every = (self.lowest, self.scale_steps, self.lowest_steps, self.numbers)
        lowest, scale_steps, lowest_steps, numbers = (None if table is None else change(table) for table in every)
        return FileTables(change(self.scales), lowest, scale_steps, lowest_steps, self.span, numbers, self.divides)

    def columns(self, low: int, high: int) -> FileTables | None:
        """Those of groups [low, high); None where a step is parted."""
        if low % self.span or (high % self.span and high != self.scales.shape[1]):
            return None
        groups, runs = slice(low, high), slice(low // self.span, -(-high // self.span))
        lowest = None if self.lowest is None else self.lowest[:, groups]
        if self.scale_steps is None:
            return replace(self, scales=self.scales[:, groups], lowest=lowest)
        lowest_steps = None if self.lowest_steps is None else self.lowest_steps[:, runs]
        return FileTables(self.scales[:, groups], lowest, self.scale_steps[:, runs], lowest_steps, self.span)

    def divided(self, parts: int) -> FileTables:
        """The same where each group is parted into ``parts``."""
        lowest = None if self.lowest is None else self.lowest.repeat_interleave(parts, dim=1)
        span = 1 if self.scale_steps is None else parts * self.span
        return replace(self, scales=self.scales.repeat_interleave(parts, dim=1), lowest=lowest, span=span)

    def with_lowest(self) -> FileTables | None:
        """The same with minimums, which are 0 where there were none. None where float16 has no such numbers."""
        if self.lowest is not None:
            return self
        lowered = -MIDDLE * (self.scales if self.scale_steps is None else self.scale_steps)
        if not _finite(lowered):
            return None
        if self.scale_steps is None:
            return FileTables(self.scales, lowered)
        return FileTables(self.scales, self.scales, self.scale_steps, lowered, self.span)


def fused_tables(parts: Sequence[FileTables | None]) -> FileTables | None:
    """Those of weights whose outputs lie side by side; None where they do not fit together."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.kind for part in found}) > 1:
        return None
    if any(part.lowest is not None for part in found):
        raised = [part.with_lowest() for part in found]
        found = [part for part in raised if part is not None]
        if len(found) < len(parts):
            return None

    def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        some = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(some) if some else None

    scales = joined([part.scales for part in found])
    assert scales is not None
    lowest, scale_steps, lowest_steps, numbers = (
        joined([getattr(part, name) for part in found]) for name in ("lowest", "scale_steps", "lowest_steps", "numbers")
    )
    return FileTables(scales, lowest, scale_steps, lowest_steps, found[0].span, numbers, found[0].divides)


def fits_half(table: torch.Tensor) -> bool:
    """Whether float16 holds every number of ``table``, and each is finite."""
    halves = table.half()
    return _finite(halves) and torch.equal(halves.float(), table.float())


def _finite(table: torch.Tensor) -> bool:
    return table.is_meta or bool(torch.isfinite(table).all())  # a dry run has no numbers
