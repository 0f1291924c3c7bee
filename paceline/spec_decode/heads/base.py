"""An autoregressive draft head: EAGLE-1/2, EAGLE-3, one MTP module reused. Drafters step it, formats load it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from paceline.attention.base import ForwardBatch
from paceline.kvcache.layout import KvLayer
from paceline.models.base import ForwardContext


@dataclass(frozen=True)
class LastRows:
    """The last row of each segment of a batch, as a batch of its own."""

    rows: torch.Tensor  # int64 [S], into the rows of the whole batch
    context: ForwardContext  # S rows, each of which sees what it sees in the whole batch


class DraftHead(ABC):
    """Row i of the head is (token t_{i+1}, a hidden row) at position i; its output predicts t_{i+2} (algorithms.md E1).

    On committed rows the hidden row is the target's own (``fuse``d); on drafted rows it is the head's output of the
    row before.
    """

    kv_layers: tuple[KvLayer, ...]  # its layers, at the pool's layer numbers that it was built with
    hidden_size: int  # width of the rows it takes and returns
    aux_layers: tuple[int, ...] = ()  # see Drafter.aux_layers
    fuses: bool = False  # ``fuse`` makes other rows of what it is given
    token_map: torch.Tensor | None = None  # int64 [draft_vocab] -> target id; None: the target's vocabulary

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's rows to what ``forward`` takes: [T, width given to extend] -> [T, hidden_size]."""
        return hidden

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """token_ids: int64 [T]; hidden: [T, hidden_size] -> [T, hidden_size]: what the next draft step is fed.

        Writes the rows' KV to ``context.batch.write_slots`` in the head's layers.
        """

    def extend(self, batch: ForwardBatch, hidden: torch.Tensor, last: LastRows) -> torch.Tensor:
        """``forward`` of committed rows where only the outputs of the last ones are wanted: [S, hidden_size], the same
        bits where rows keep theirs whatever lies beside them. The other rows leave nothing but their KV."""
        context = ForwardContext.build(batch, last.context.kv, last.context.attention)
        return self.forward(batch.token_ids, hidden, context)[last.rows]

    @abstractmethod
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """output: [R, hidden_size], rows that ``forward`` returned -> float32 [R, draft_vocab]."""
