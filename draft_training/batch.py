"""Batches of samples without padding, and which rows of them a draft head is trained on.

A head's row i is (token t_{i+1}, hidden row h_i) and predicts t_{i+2} (algorithms.md E1). Only some rows are trained,
the *columns*: rows prompt_len - 1 and on, whose prediction falls in the answer, or also those before, down to where
the prompt is more than its template. Draft step s of the column at row i
(training-time test, C7) is fed token t_{i+1+s} and predicts t_{i+2+s}, which the target predicts from h_{i+1+s}.
All rows of all samples lie one after another, R in all, and so do all columns, C in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draft_training.features import SampleRows


@dataclass(frozen=True)
class Batch:
    """B samples."""

    token_ids: torch.Tensor  # int64 [R]
    following: torch.Tensor  # int64 [R], t_{i+1}; 0 in a sample's last row
    positions: torch.Tensor  # int64 [R]
    aux: torch.Tensor  # [R, aux_layers * hidden_size]
    final: torch.Tensor  # [R, hidden_size], after the final norm
    columns: torch.Tensor  # int64 [C], the row of each column
    last: torch.Tensor  # int64 [C], the last row of its sample
    row_counts: tuple[int, ...]  # rows of each sample
    column_counts: tuple[int, ...]  # columns of each sample

    def rows(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row i + shift of every column, clamped to its sample, int64 [C]; and whether that row exists, bool [C]."""
        rows = self.columns + shift
        return torch.minimum(rows, self.last), rows <= self.last

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``."""
        names = ("token_ids", "following", "positions", "aux", "final", "columns", "last")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def first_column(sample: SampleRows, framing: int | None) -> int:
    """The first row trained on: of the answer, or of all that follows ``framing`` tokens of chat template."""
    return max(0, (sample.prompt_len if framing is None else min(framing, sample.prompt_len)) - 1)


def collate(samples: Sequence[SampleRows], hidden_size: int, framing: int | None = None) -> Batch:
    """One batch of ``samples``; the last row of a sample has no label and is no column. framing: see first_column."""
    features = torch.cat([s.features for s in samples])
    columns, last, following = [], [], []
    at = 0
    for sample in samples:
        n = len(sample.token_ids)
        columns.append(torch.arange(at + first_column(sample, framing), at + n - 2 + 1))
        last.append(torch.full((len(columns[-1]),), at + n - 1))
        following += [sample.token_ids[1:], torch.zeros(1, dtype=torch.int64)]
        at += n
    return Batch(
        torch.cat([s.token_ids for s in samples]),
        torch.cat(following),
        torch.cat([torch.arange(len(s.token_ids)) for s in samples]),
        features[:, :-hidden_size].contiguous(),
        features[:, -hidden_size:].contiguous(),
        torch.cat(columns),
        torch.cat(last),
        tuple(len(s.token_ids) for s in samples),
        tuple(len(c) for c in columns),
    )
