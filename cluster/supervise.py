"""Keeps the wanted nodes running: a node that dies is replaced by its next generation, after a backoff."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

POLL_S = 0.05
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 60.0  # a life this long resets the backoff


class NodeHandle(Protocol):
    """A node process; ``start`` and ``stop`` block."""

    def start(self) -> str: ...

    def died(self) -> bool: ...

    def stop(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


Launch = Callable[[str, str, int], NodeHandle]  # (role, node id, generation)


@dataclass
class Slot:
    """One wanted node."""

    role: str
    node_id: str
    generation: int = 0
    handle: NodeHandle | None = None
    address: str = ""
    started_at: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    restarts: int = 0
    last_error: str = ""


@dataclass
class Supervisor:
    """Owns the node processes of a deployment.

    Life of a slot: launched (a new generation) -> started (its address known) -> died -> after ``backoff_s`` launched
    again; until ``stop``.
    """

    launch: Launch
    clock: Callable[[], float] = time.monotonic
    slots: list[Slot] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False

    def want(self, role: str, count: int) -> None:
        """Add ``count`` nodes of ``role`` to the wanted set; before ``start``."""
        self.slots += [Slot(role, f"{role}-{i}") for i in range(count)]

    async def start(self) -> None:
        """Start all wanted nodes side by side. Raises what the first failing one raised: a deployment that cannot
        start at all is a mistake to report, not to retry."""
        await asyncio.gather(*(self._start_slot(slot) for slot in self.slots))
        self._tasks = [asyncio.create_task(self._watch(slot), name=f"watch-{slot.node_id}") for slot in self.slots]

    async def _start_slot(self, slot: Slot) -> None:
        slot.generation += 1
        slot.handle = await asyncio.to_thread(self.launch, slot.role, slot.node_id, slot.generation)
        slot.address = await asyncio.to_thread(slot.handle.start)
        slot.started_at = self.clock()
        log.info("%s generation %d serves at %s", slot.node_id, slot.generation, slot.address)

    async def _watch(self, slot: Slot) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if slot.handle is None or slot.handle.died():
                await self._replace(slot)

    async def _replace(self, slot: Slot) -> None:
        if slot.handle is not None:
            log.warning("%s generation %d died", slot.node_id, slot.generation)
            if self.clock() - slot.started_at >= HEALTHY_AFTER_S:
                slot.backoff_s = FIRST_BACKOFF_S
        slot.handle = None
        await asyncio.sleep(slot.backoff_s)
        slot.backoff_s = min(slot.backoff_s * 2, MAX_BACKOFF_S)
        try:
            await self._start_slot(slot)
            slot.restarts += 1
            slot.last_error = ""
        except Exception as error:  # whatever a start can fail with must not end the watch
            slot.last_error = str(error)
            log.error("%s did not restart, next try in %.1f s: %s", slot.node_id, slot.backoff_s, error)
            if slot.handle is not None:
                slot.handle.kill()
                slot.handle = None

    async def stop(self, grace_s: float) -> None:
        """Stop watching, then drain and end all nodes side by side. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        handles = [slot.handle for slot in self.slots if slot.handle is not None]
        await asyncio.gather(*(asyncio.to_thread(handle.stop, grace_s) for handle in handles), return_exceptions=True)
