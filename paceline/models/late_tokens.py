"""Tokens of a batch that only the device knows when the host fills the batch in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.layers.upload import Int64, staged_index


@dataclass(frozen=True)
class LateTokens:
    """They take the places of the ids that the batch's segments name for these rows."""

    tokens: torch.Tensor  # int64 [n], on the model's device, below the vocabulary
    rows: Int64  # [n], distinct, of the batch as its segments lie one after another

    def put(self, token_ids: torch.Tensor, places: Int64 | None = None) -> None:
        """Into a batch's int64 ids. places: where the segments' rows lie among them; None: one after another. The host
        does not wait."""
        rows = self.rows if places is None else places[self.rows]
        token_ids.index_copy_(0, staged_index(rows, token_ids.device), self.tokens)
