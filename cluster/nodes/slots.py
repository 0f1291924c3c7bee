"""What the supervisor knows of each wanted node, what it can do with its process, and what it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.errors import NodeUnavailable

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0


class NotPlaced(NodeUnavailable):
    """No host has room for a node now; one may come."""


class NodeHandle(Protocol):
    """A node process; ``start``, ``stop`` and ``kill`` block, each within a deadline of its own."""

    def start(self) -> str:
        """Start the node; returns its gRPC address. Raises PacelineError."""

    def died(self) -> bool:
        """Whether the process is gone or was stopped."""

    async def answers(self) -> bool:
        """Whether the process and its gRPC server answer within a second or so, and the engine loop ticks."""

    def stop(self, grace_s: float) -> None:
        """Drain and end, for at most ``grace_s`` seconds and a margin. Never raises."""

    def kill(self) -> None:
        """End the process now. Never raises; does nothing to one that is gone."""


Launch = Callable[[str, str, int], NodeHandle]  # (role, node id, generation)


@dataclass(frozen=True)
class NodeEvent:
    """Something that happened to a node."""

    kind: Literal["started", "died", "lease_lost", "kept", "cut_off", "not_asked", "start_failed", "stopped"]
    node_id: str
    role: str
    generation: int
    detail: str = ""  # the address, or what went wrong
    retry_in_s: float = 0.0  # of died, lease_lost and start_failed: the backoff that follows


@dataclass
class Slot:
    """One wanted node."""

    role: str
    node_id: str
    generation: int = 0
    handle: NodeHandle | None = None
    address: str = ""
    started_at: float = 0.0
    leased_at: float = 0.0  # when its lease was last seen, or its host found silent
    answered_at: float = 0.0  # when it was last asked and answered; the grace runs from the later of the two
    asked_at: float = 0.0
    cut_off: bool = False
    not_asked: bool = False  # nobody knows whether its host answers, since this process could not ask
    kept: bool = False  # it has had no lease for a whole grace, but answers
    replaced_for_lease: bool = False  # it was killed for its lease, and has not started anew
    backoff_s: float = FIRST_BACKOFF_S
    starts: int = 0
    failures: int = 0  # starts in a row that failed, or whose process did not live for HEALTHY_AFTER_S
    last_error: str = ""  # of its latest start
    wish: Literal["run", "rest", "leave"] = "run"  # of the operators: rest is without a process, leave for good
    grace_s: float = 0.0  # what its streams get when it rests or leaves
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # whoever ends or starts its process

    @property
    def restarts(self) -> int:
        """How often it was started anew."""
        return max(0, self.starts - 1)

    def adopt(self, handle: NodeHandle, generation: int, address: str, now: float) -> None:
        """An earlier supervisor started its process. now: on the supervisor's clock."""
        self.handle, self.generation, self.address, self.starts = handle, generation, address, 1
        self.started_at = self.leased_at = now
