"""What operators change about the nodes of a deployment that runs.

A change is kept in Redis before it is made (`cluster.state.wanted`), so whoever supervises next goes on with it. It is
made by the supervisor, whether or not the operator waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cluster.nodes.slots import FIRST_BACKOFF_S, NodeEvent, Slot
from cluster.nodes.supervise import Supervisor
from cluster.state.wanted import MAX_NODES, WantedNode
from paceline.errors import InvalidRequest, NodeUnavailable

log = logging.getLogger(__name__)

ROLES = ("prefill", "decode")


class NodePlaces(Protocol):
    """Where nodes run. Calls block."""

    def add(self, node: WantedNode) -> None:
        """One more node may be launched."""

    def remove(self, node_id: str) -> None:
        """A node that has ended is launched no more."""

    def check_fits(self, node: WantedNode) -> None:
        """Raise InvalidRequest where a node in its role needs more than its place has."""


@dataclass
class NodeChanges:
    """Adds, drains, starts, removes and switches nodes, one change at a time."""

    supervisor: Supervisor
    places: NodePlaces
    wanted: list[WantedNode]  # a slot of the supervisor each
    keep: Callable[[list[WantedNode]], None]  # for the next supervisor; blocks
    resources: dict[str, str] = field(default_factory=dict)  # Ray resource of new nodes, by role
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.supervisor.on_left = lambda slot: self.places.remove(slot.node_id)

    def of(self, node_id: str) -> WantedNode:
        """A node that is wanted. Raises InvalidRequest."""
        return self.wanted[self._index(node_id)]

    def slot(self, node_id: str) -> Slot:
        """The supervisor's. Raises InvalidRequest where there is none."""
        found = next((slot for slot in self.supervisor.slots if slot.node_id == node_id), None)
        if found is None:
            raise _unknown(node_id, [slot.node_id for slot in self.supervisor.slots])
        return found

    async def add(self, role: str, host: str = "") -> Slot:
        """Want one more node. host: address by which Ray knows the one host for it; empty: any. Raises InvalidRequest,
        and NodeUnavailable where the wish cannot be kept."""
        _check_role(role)
        async with self._changing:
            if len(self.wanted) >= MAX_NODES:
                raise InvalidRequest("role", f"a deployment has at most {MAX_NODES} nodes")
            node = WantedNode(self._free_id(role), role, self.resources.get(role, ""), host, self._free_number())
            before = self.wanted
            await self._keep([*before, node])
            try:
                await asyncio.to_thread(self.places.add, node)
            except Exception:  # Ray's own: nobody could list or remove it
                await self._keep(before)
                raise
            slot = Slot(role, node.node_id)
            self.supervisor.add(slot)
            return slot

    async def drain(self, node_id: str, grace_s: float) -> Slot:
        """Let a node finish what runs there within ``grace_s``, then end its process; its place stays. Returns at once.
        Raises InvalidRequest where no other decode node serves."""
        async with self._changing:
            slot = self.slot(self.of(node_id).node_id)  # one on its way out still has a slot
            self._check_goes(slot)
            await self._keep([replace(node, drained=node.drained or node.node_id == node_id) for node in self.wanted])
            return _wish(slot, "rest", grace_s)

    async def start(self, node_id: str) -> Slot:
        """Start a node that was drained. Returns at once. Raises InvalidRequest for one that is not wanted."""
        async with self._changing:
            index, slot = self._index(node_id), self.slot(node_id)
            wanted = list(self.wanted)
            wanted[index] = replace(wanted[index], drained=False)
            await self._keep(wanted)
            if slot.wish == "rest":
                slot.backoff_s, slot.failures = FIRST_BACKOFF_S, 0
            return _wish(slot, "run", 0.0)

    async def remove(self, node_id: str, grace_s: float) -> Slot:
        """Drain a node, end its process and want it no more. Returns at once. Raises as ``drain`` does."""
        async with self._changing:
            slot = self.slot(node_id)
            self._check_goes(slot)
            await self._keep([node for node in self.wanted if node.node_id != node_id])
            return _wish(slot, "leave", grace_s)

    async def switch(self, node_id: str, role: str, grace_s: float) -> Slot:
        """Drain a node and start it again in another role, at its place and under its name.

        What still runs there after ``grace_s`` goes on elsewhere. Raises InvalidRequest for a node or a role that is
        not there, where its place is too small for the role, and where no decode node would be left; what its start
        raises, after which it is started again and again in the new role, as after a death.
        """
        supervisor, slot = self.supervisor, self.slot(node_id)
        _check_role(role)
        async with self._changing, slot.lock:
            if supervisor.superseded:
                raise NodeUnavailable("another process supervises this deployment now")
            if role == slot.role:
                return slot
            if slot.wish != "run":
                raise InvalidRequest("node_id", f"{node_id} is drained, or on its way out")
            if slot.role == "decode" and not self._others_decode(slot):
                raise InvalidRequest("role", f"{node_id} is the only decode node")
            await asyncio.to_thread(self.places.check_fits, replace(self.of(node_id), role=role))
            await self._keep([replace(node, role=role) if node.node_id == node_id else node for node in self.wanted])
            if slot.handle is not None:
                await supervisor.drain_slot(slot, slot.handle, grace_s)
                supervisor.tell(NodeEvent("stopped", slot.node_id, slot.role, slot.generation))
            slot.role = role
            try:
                await supervisor.start_slot(slot)
            except Exception:
                await supervisor.discard(slot)
                raise
            return slot

    async def _keep(self, wanted: list[WantedNode]) -> None:
        """Raises NodeUnavailable; nothing is changed then."""
        if self.supervisor.superseded:
            raise NodeUnavailable("another process supervises this deployment now")
        await asyncio.to_thread(self.keep, wanted)
        self.wanted = wanted

    def _check_goes(self, slot: Slot) -> None:
        """Raises InvalidRequest where the deployment would serve no more."""
        if slot.role == "decode" and slot.wish == "run" and not self._others_decode(slot):
            raise InvalidRequest("node_id", f"{slot.node_id} is the only decode node that serves")

    def _others_decode(self, slot: Slot) -> bool:
        """Whether another decode node is wanted, and runs."""
        others = [other for other in self.supervisor.slots if other is not slot and other.role == "decode"]
        return any(other.wish == "run" and _serves(other) for other in others)

    def _index(self, node_id: str) -> int:
        ids = [node.node_id for node in self.wanted]
        if node_id not in ids:
            raise _unknown(node_id, ids)
        return ids.index(node_id)

    def _free_id(self, role: str) -> str:
        """One that no node has, nor one that is leaving."""
        taken = {node.node_id for node in self.wanted} | {slot.node_id for slot in self.supervisor.slots}
        return next(name for name in (f"{role}-{number}" for number in range(len(taken) + 1)) if name not in taken)

    def _free_number(self) -> int:
        taken = {node.cores_slot for node in self.wanted}
        return next(number for number in range(len(taken) + 1) if number not in taken)


def _serves(slot: Slot) -> bool:
    return slot.handle is not None and bool(slot.address) and not slot.cut_off


def _wish(slot: Slot, wish: Literal["run", "rest", "leave"], grace_s: float) -> Slot:
    slot.wish, slot.grace_s = wish, grace_s
    return slot


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise InvalidRequest("role", f"{role!r} is neither {' nor '.join(ROLES)}")


def _unknown(node_id: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest("node_id", f"{node_id!r} is none of {', '.join(known)}")
