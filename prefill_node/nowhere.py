"""The link of a prompt that nobody takes over: nothing is left to decode after its first token, so its rows stay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kv_transfer.handoff.block import ByteClass, RowBlock
from paceline.v1 import handoff_pb2


class Nowhere:
    """See ``Carrier``. Takes everything and sends nothing: a hand-off is acknowledged when it ends."""

    def __init__(self, ended: Callable[[str, str | None], None]) -> None:
        """ended: takes a ticket and why it failed, None: it did not. Called on the engine thread, which it posts to."""
        self._ended = ended

    def groups(self, layers: range, num_tokens: int) -> tuple[range, ...]:
        """See Carrier."""
        return ()

    def begin(self, ticket: str, tokens: range, grant: bytes = b"") -> None:
        """See Carrier."""

    def rows(self, ticket: str, block: RowBlock, slots: torch.Tensor) -> None:
        """See Carrier."""

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """See Carrier."""

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """See Carrier."""
        self._ended(ticket, None)

    def abort(self, ticket: str, reason: str) -> None:
        """See Carrier."""
        self._ended(ticket, reason)

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """See Carrier."""
        return {}

    def sending_s(self, ticket: str) -> float:
        """See Carrier."""
        return 0.0

    def lost(self, reason: str) -> None:
        """See Carrier. There is nothing to lose: no answer is waited for."""
