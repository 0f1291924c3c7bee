"""Where the hand-offs of a link land."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kv_transfer.handoff.block import RowBlock
from kv_transfer.handoff.state import Handoff
from paceline.v1.handoff_pb2 import State


class HandoffSink(Protocol):
    """The decode node, as a link sees it. Called on the receiver thread; no method may block for long."""

    def lookup(self, ticket: str) -> Handoff | None:
        """The hand-off of a ticket, or None when it was never issued or is forgotten."""

    def write_kv(self, ticket: str, block: RowBlock, data: Tensor) -> None:
        """Scatter rows into the pages of the ticket; hidden rows are kept. ``data``: flat, of the layout and dtype that
        the hand-off expects, in canonical order (layer, token, head); valid during the call only. An exception fails
        this ticket alone."""

    def ready(self, ticket: str, state: State, hidden: Tensor) -> None:
        """All rows are written. ``hidden``: [num_hidden_rows, hidden_size], the layout's hidden dtype; the sink's."""

    def failed(self, ticket: str, reason: str) -> None:
        """The hand-off is FAILED and will not be written to any more."""
