"""Keeps the wanted nodes running: a node that dies is replaced by its next generation, after a backoff."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.nodes.slots import FIRST_BACKOFF_S, MAX_BACKOFF_S, Launch, NodeEvent, NodeHandle, NotPlaced, Slot
from cluster.nodes.threads import in_thread

log = logging.getLogger(__name__)

POLL_S = 0.05
HEALTHY_AFTER_S = 10.0  # a life this long, as long as the longest backoff, resets it
LEASE_GRACE_S = 2.0  # a node without its lease for so long is replaced; the router has stopped using it
ASK_AFTER_S = 0.25  # between two questions to a node without its lease, or to its host
ASK_KEPT_AFTER_S = 1.0  # to one that answered
KILL_TIMEOUT_S = 10.0
STOP_MARGIN_S = 45.0  # past the grace; handles have closer deadlines of their own


@dataclass
class Supervisor:
    """Owns the node processes of a deployment.

    Life of a slot: launched (a new generation) -> started (its address known) -> died, or without its lease for
    ``lease_grace_s`` -> killed -> after ``backoff_s`` launched again; until ``stop``, or until operators wish it to
    rest or to leave (``Slot.wish``, see `changes`): then it drains and ends.

    A node without its lease on a host that does not answer is cut off: nothing can be ended or started there. It is
    left alone until it has its lease again, which costs no reload, or is known to have died, or its host has answered
    for a whole grace, in which it could have had its lease back. So is one whose host could not be asked, since this
    process has no connection left to ask by. A node without its lease that answers itself is kept:
    Redis may take no writes. At most half of a role's nodes are down for a lost lease at a time.
    """

    # It has over 20 methods, since each step of a slot's life has one, and all of them read the same slots.

    launch: Launch
    on_event: Callable[[NodeEvent], None] = lambda event: None
    issue: Callable[[str, int], int] = lambda node_id, above: above + 1  # DeploymentLease.issue; blocks
    has_lease: Callable[[str, int], bool] = lambda node_id, generation: True  # NodeDirectory.holds
    heard: Callable[[str, int, bool], None] = lambda node_id, generation, alive: None  # NodeDirectory.heard
    ended: Callable[[str, int], None] = lambda node_id, generation: None  # NodeDirectory.ended
    # Whether the host at an address answers; None: it could not be asked.
    reachable: Callable[[str], Awaitable[bool | None]] = lambda address: _yes()
    may_act: Callable[[], bool] = lambda: True  # whether nobody else can supervise; asked before each act
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    slots: list[Slot] = field(default_factory=list, init=False)
    on_left: Callable[[Slot], None] = lambda slot: None  # a node that was to leave has; blocks
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _stopping: bool = field(default=False, init=False)
    superseded: bool = field(default=False, init=False)  # another process supervises
    trouble: str = field(default="", init=False)  # why no process can be started or ended now

    def want(self, role: str, count: int) -> None:
        """Add ``count`` nodes of ``role`` to the wanted set; before ``start``."""
        self.slots += [Slot(role, f"{role}-{i}") for i in range(count)]

    async def start(self) -> None:
        """Start all wanted nodes side by side. Raises what the first failing one raised: a deployment that cannot
        start at all is a mistake to report, not to retry. A node that no host has room for is tried again while the
        others serve, as long as one of them decodes."""
        running = [slot for slot in self.slots if slot.wish == "run" and slot.handle is None]
        missing = [error for error in await asyncio.gather(*(self._first_start(slot) for slot in running)) if error]
        if missing and not any(slot.role == "decode" and slot.handle is not None for slot in self.slots):
            raise missing[0]
        for slot in self.slots:
            self.add(slot)

    def add(self, slot: Slot) -> None:
        """Look after a slot from now on; a start that fails is tried again and again."""
        if slot not in self.slots:
            self.slots.append(slot)
        task = asyncio.create_task(self._watch(slot), name=f"watch-{slot.node_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _first_start(self, slot: Slot) -> NotPlaced | None:
        try:
            await self.start_slot(slot)
        except NotPlaced as error:
            await self._start_failed(slot, error)
            return error
        return None

    async def start_slot(self, slot: Slot) -> None:
        """Start the next generation of a node; whoever calls has its lock. Raises what the start raises."""
        slot.generation = await in_thread(self.issue, slot.node_id, slot.generation)
        slot.address = await in_thread(self._launch_and_start, slot)
        slot.started_at = slot.leased_at = self.clock()
        slot.cut_off = slot.not_asked = slot.kept = slot.replaced_for_lease = False
        slot.last_error = ""
        slot.starts += 1
        self.tell(NodeEvent("started", slot.node_id, slot.role, slot.generation, slot.address))

    def _launch_and_start(self, slot: Slot) -> str:
        """Start a process, in a thread where a cancelled start goes on: one that comes after ``stop`` is ended here."""
        handle = self.launch(slot.role, slot.node_id, slot.generation)
        slot.handle = handle
        if self._stopping or self.superseded or not self.may_act():
            handle.kill()
        return handle.start()

    async def _watch(self, slot: Slot) -> None:
        while slot in self.slots and not (self._stopping or self.superseded):
            await self.sleep(POLL_S)
            if self.trouble or not self.may_act():
                continue
            try:
                async with slot.lock:
                    await self._look_after(slot)
                if slot.wish == "leave" and slot.handle is None:
                    try:
                        await in_thread(self.on_left, slot)
                    finally:  # no earlier: who takes its name is to get a place of its own
                        self.slots.remove(slot)
            except Exception:  # a fault in here must not leave the node unwatched
                log.exception("watching %s failed", slot.node_id)

    async def _look_after(self, slot: Slot) -> None:
        if slot.wish != "run":
            await self._stop_slot(slot, slot.grace_s)
            return
        kind = self._lost(slot)
        if kind == "lease_lost" and not await self._grace_is_over(slot):
            return
        if slot.handle is None or kind:
            await self._replace(slot, kind)

    def _lost(self, slot: Slot) -> Literal["died", "lease_lost"] | None:
        if slot.handle is None:
            return None
        if slot.handle.died():
            self.ended(slot.node_id, slot.generation)
            return "died"
        if self.has_lease(slot.node_id, slot.generation):
            slot.leased_at = self.clock()
            slot.cut_off = slot.not_asked = slot.kept = False
            return None
        return "lease_lost"

    async def _grace_is_over(self, slot: Slot) -> bool:
        """Whether a node without its lease has had LEASE_GRACE_S to renew it, on a host that answers, and did not
        answer itself in that time."""
        if self.clock() - slot.asked_at < (ASK_KEPT_AFTER_S if slot.kept else ASK_AFTER_S):
            return False
        slot.asked_at = self.clock()
        if not await self._host_answers(slot):
            slot.leased_at = self.clock()
            return False
        if await self._answers(slot):
            return False
        since = self.clock() - max(slot.leased_at, slot.answered_at)
        return since >= LEASE_GRACE_S and _may_replace(slot, self.slots)

    async def _host_answers(self, slot: Slot) -> bool:
        """Whether its host is known to answer; tells once when it is not."""
        answers = await self.reachable(slot.address)
        if answers is None and not slot.not_asked:
            detail = "this process has no open files, ports or memory left to ask whether its host answers"
            self.tell(NodeEvent("not_asked", slot.node_id, slot.role, slot.generation, detail))
        if answers is False and not slot.cut_off:
            self.tell(NodeEvent("cut_off", slot.node_id, slot.role, slot.generation, slot.address))
        slot.not_asked = answers is None
        slot.cut_off = not answers if answers is not None else slot.cut_off
        return bool(answers)

    async def _answers(self, slot: Slot) -> bool:
        """Ask a node without its lease; the router goes on using one that answers."""
        alive = slot.handle is not None and await slot.handle.answers()
        self.heard(slot.node_id, slot.generation, alive)
        if alive:
            slot.answered_at = self.clock()
            if not slot.kept and self.clock() - slot.leased_at >= LEASE_GRACE_S:
                slot.kept = True
                detail = "it has no lease in Redis, but answers; used on"
                self.tell(NodeEvent("kept", slot.node_id, slot.role, slot.generation, detail))
        return alive

    async def _replace(self, slot: Slot, kind: Literal["died", "lease_lost"] | None) -> None:
        if slot.handle is not None and kind is not None:
            if self.clock() - slot.started_at >= HEALTHY_AFTER_S:
                slot.backoff_s, slot.failures = FIRST_BACKOFF_S, 0
            else:
                slot.failures += 1
            slot.replaced_for_lease = kind == "lease_lost"
            self.tell(NodeEvent(kind, slot.node_id, slot.role, slot.generation, "", slot.backoff_s))
            await self.discard(slot)
        await self.sleep(slot.backoff_s)
        if slot.wish != "run":
            return
        slot.backoff_s = min(slot.backoff_s * 2, MAX_BACKOFF_S)
        try:
            await self.start_slot(slot)
        except Exception as error:  # whatever a start can fail with must not end the watch
            await self._start_failed(slot, error)

    async def _start_failed(self, slot: Slot, error: Exception) -> None:
        slot.last_error = str(error) or repr(error)
        slot.failures += 1
        wait_s = slot.backoff_s
        self.tell(NodeEvent("start_failed", slot.node_id, slot.role, slot.generation, slot.last_error, wait_s))
        await self.discard(slot)

    async def discard(self, slot: Slot) -> None:
        """End what may be left of the process: a stopped or wedged one still holds its memory and its name."""
        if slot.handle is None or not self.may_act():
            return
        handle, slot.handle, slot.address = slot.handle, None, ""
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await in_thread(handle.kill)
        except Exception as error:
            log.warning("%s generation %d could not be killed: %r", slot.node_id, slot.generation, error)

    def tell(self, event: NodeEvent) -> None:
        """Log an event, and give it to the listener."""
        level = logging.INFO if event.kind in ("started", "stopped") else logging.WARNING
        detail = f": {event.detail}" if event.detail else ""
        retry = f"; next try in {event.retry_in_s:.1f} s" if event.retry_in_s else ""
        log.log(level, "%s generation %d %s%s%s", event.node_id, event.generation, event.kind, detail, retry)
        try:
            self.on_event(event)
        except Exception:
            log.exception("the listener of node events failed")

    async def stand_down(self, successor: str) -> None:
        """Another process supervises this deployment now: end, start and replace no node any more. Idempotent."""
        self.superseded = True
        log.error("this deployment is supervised by %s now; this process looks after no node any more", successor)
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, grace_s: float | None) -> None:
        """Stop watching, then drain and end all nodes side by side, in bounded time. They are left alone without a
        grace, after ``stand_down``, and where another process may supervise. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        await self._stop_watching()
        if grace_s is None or self.superseded or not self.may_act():
            return
        await asyncio.gather(*(self._end_slot(slot, grace_s) for slot in self.slots))

    async def _end_slot(self, slot: Slot, grace_s: float) -> None:
        """A node that has no lease and does not answer would not hear that it is to drain."""
        hears = slot.handle is None or self.has_lease(slot.node_id, slot.generation) or await slot.handle.answers()
        if not hears:
            await self.discard(slot)
        await self._stop_slot(slot, grace_s)

    async def _stop_slot(self, slot: Slot, grace_s: float) -> None:
        handle = slot.handle
        if handle is None:
            return
        if not slot.address or await self.reachable(slot.address) is False:
            await self.discard(slot)  # it still starts, or cannot drain; Ray ends it when it sees the host again
        else:
            await self.drain_slot(slot, handle, grace_s)
        self.tell(NodeEvent("stopped", slot.node_id, slot.role, slot.generation))

    async def drain_slot(self, slot: Slot, handle: NodeHandle, grace_s: float) -> None:
        """Let a node finish its work for ``grace_s``, then end its process."""
        if not self.may_act():
            return
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await in_thread(handle.stop, grace_s)
            slot.handle, slot.address = None, ""
        except Exception as error:
            log.warning("%s did not stop, killing it: %r", slot.node_id, error)
            await self.discard(slot)


def _may_replace(slot: Slot, slots: Sequence[Slot]) -> bool:
    """Whether one more node of this role may be down for its lease."""
    peers = [other for other in slots if other.role == slot.role]
    return 2 * sum(other.replaced_for_lease for other in peers) < len(peers)


async def _yes() -> bool:
    return True
