"""What of a prompt crosses from a prefill node to a decode node besides the target's KV rows."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine_config import EngineConfig
from paceline.spec_decode.base import Drafter


@dataclass(frozen=True)
class HandoffContents:
    """Widths in elements."""

    mode: str  # draft_kv, hidden_states or none
    hidden_size: int  # of the hidden rows in the drafter's state
    row_width: int = 0  # of the hidden row that comes for each token; 0: none crosses
    fused: bool = False  # those rows went through ``Drafter.fuse``
    checksum: bool = False  # bytes that cross carry a sum

    @classmethod
    def of(cls, config: EngineConfig, drafter: Drafter, hidden_size: int) -> HandoffContents:
        """hidden_size: the target's, for drafters that name no width of their own."""
        fused = config.handoff_rows == "fused" and drafter.fused_width > 0
        width = drafter.fused_width if fused else drafter.row_width
        return cls(
            config.handoff,
            drafter.state_width or hidden_size,
            width if config.handoff == "hidden_states" else 0,
            fused,
            config.handoff_checksum,
        )
