"""The nodes of a deployment as operators see them: what is wanted, and what runs."""

from __future__ import annotations

from typing import Protocol

from cluster.nodes.slots import Slot
from cluster.state.registry_types import NodeRecord
from paceline.v1 import admin_pb2


class NodeView(Protocol):
    """NodeDirectory, as far as it is needed here."""

    def nodes(self) -> list[NodeRecord]:
        """The nodes with a lease that are used."""

    def is_foreign(self, node_id: str, generation: int) -> bool:
        """Whether a node is not used because it serves something else."""


def node_of(slot: Slot, view: NodeView) -> admin_pb2.AdminNode:
    """One node."""
    found = next((r for r in view.nodes() if (r.id, r.generation) == (slot.node_id, slot.generation)), None)
    runs = slot.handle is not None
    node = admin_pb2.AdminNode(
        node_id=slot.node_id,
        role=slot.role,
        state=_state(slot, found, view),
        generation=slot.generation,
        address=slot.address if runs else "",
        restarts=slot.restarts,
        detail=slot.last_error,
    )
    if found is not None and runs:
        node.host, node.pid, node.since, node.build = found.hostname, found.pid, found.started_at, found.build
        node.running, node.waiting = found.running, found.waiting
        node.ranks = found.ranks
        node.free_pages, node.total_pages = found.free_pages, found.total_pages
    return node


def _state(slot: Slot, record: NodeRecord | None, view: NodeView) -> str:
    if slot.wish == "leave":
        return "gone" if slot.handle is None else "removing"
    if slot.wish == "rest":
        return "drained" if slot.handle is None else "draining"
    if slot.handle is None or not slot.address:
        return "failing" if slot.last_error else "starting"
    if record is not None and not slot.kept:
        return record.state
    if view.is_foreign(slot.node_id, slot.generation):
        return "foreign"
    if slot.cut_off or slot.kept:
        return "cut off" if slot.cut_off else "kept"
    return "silent" if slot.leased_at > slot.started_at else "starting"  # its first lease was not read yet
