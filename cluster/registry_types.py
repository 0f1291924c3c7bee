"""What the registry knows of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeRecord:
    """One node under a live lease."""

    id: str  # e.g. "decode-0"; the same across restarts
    role: str  # "prefill" or "decode"
    generation: int  # grows with every restart; a lower one can never replace a higher one
    address: str  # host:port of its gRPC server
    state: str = "ready"  # or "draining"
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
