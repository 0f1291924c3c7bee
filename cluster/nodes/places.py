"""Where in a Ray cluster the nodes run: a placement group holds a place for each, over its generations."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import ray
from ray._private.state import available_resources_per_node
from ray.util import get_placement_group
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from cluster.nodes.bundles import CPU, GPU, Host, Wanted, where
from paceline.errors import InvalidRequest, NodeUnavailable

log = logging.getLogger(__name__)

TOGETHER_TIMEOUT_S = 3.0  # for all nodes to be placed as one group; a missing host delays the others for so long
ALONE_TIMEOUT_S = 57.0  # after that, for the first node that the deployment cannot do without
THERE_TIMEOUT_S = 1.0  # to find out whether a node has its place


class Places:
    """The places of all nodes of a deployment.

    Ray places a group as a whole or not at all. Where that does not succeed in TOGETHER_TIMEOUT_S, because a host is
    missing, each node has a group of its own, and those that have a place can run.
    """

    def __init__(
        self,
        name: str,
        wanted: Sequence[Wanted],
        lifetime: Literal["detached"] | None = None,
        found: Mapping[str, int] | None = None,
    ) -> None:
        """name: of the groups in Ray. lifetime: ``detached`` places outlive this process. found: those of an earlier
        supervisor are used on, by node the index in the group of all, or -1. Blocks. Raises NodeUnavailable when no
        vital node has a place in time."""
        self._name, self._lifetime = name, lifetime
        self._bundles = {node.node_id: node.bundle for node in wanted}
        self._spare: list[tuple[dict[str, float], int]] = []  # bundles of the one group whose nodes left
        self._together: PlacementGroup | None = None
        if found is None:
            self._place(wanted)
        else:
            self._together = _found(name)
            self._groups = {node.node_id: self._used_on(node, found.get(node.node_id, -1)) for node in wanted}

    def _used_on(self, node: Wanted, index: int) -> tuple[PlacementGroup, int]:
        if index >= 0 and self._together is not None:
            return self._together, index
        return _found(f"{self._name}/{node.node_id}") or self._alone(node), 0

    def _place(self, wanted: Sequence[Wanted]) -> None:
        # Apart where there are hosts enough, together where not. STRICT_SPREAD would refuse more nodes than hosts,
        # and would leave the nodes of a lost host unplaced for as long as no other comes.
        bundles = [node.bundle for node in wanted]
        together = placement_group(bundles, strategy="SPREAD", name=self._name, lifetime=self._lifetime)
        self._groups = {node.node_id: (together, index) for index, node in enumerate(wanted)}
        self._together = together
        if not together.wait(TOGETHER_TIMEOUT_S):
            self._together = None
            log.warning("%s; each is placed by itself", _unplaced(wanted, TOGETHER_TIMEOUT_S))
            remove_placement_group(together)
            self._groups = {node.node_id: (self._alone(node), 0) for node in wanted}
            self._wait_for_one(wanted)

    def _wait_for_one(self, wanted: Sequence[Wanted]) -> None:
        end = time.monotonic() + ALONE_TIMEOUT_S
        while not any(self.there(node.node_id) for node in wanted if node.vital):
            if time.monotonic() >= end:
                self.close()
                raise NodeUnavailable(_unplaced(wanted, TOGETHER_TIMEOUT_S + ALONE_TIMEOUT_S))

    def add(self, node: Wanted) -> None:
        """Ask for a place for one more node: that of one that left, or another, which need not be there at once."""
        spare = next((found for found in self._spare if found[0] == node.bundle), None)
        if spare is not None and self._together is not None:
            self._spare.remove(spare)
            self._groups[node.node_id] = (self._together, spare[1])
        else:
            self._groups[node.node_id] = (self._alone(node), 0)
        self._bundles[node.node_id] = node.bundle

    def check_fits(self, node: Wanted) -> None:
        """Raise InvalidRequest where a node needs more GPUs or CPUs than its place has, as in another role."""
        has = self._bundles[node.node_id]
        short = [f"{node.bundle[name]:g} {name}" for name in (GPU, CPU) if node.bundle.get(name, 0) > has.get(name, 0)]
        if short:
            told = ", ".join(f"{has.get(name, 0):g} {name}" for name in (GPU, CPU) if name in {*has, *node.bundle})
            needs = f"{node.node_id} would need {', '.join(short)}, its place has {told}"
            raise InvalidRequest("role", f"{needs}: add a node of that role and remove this one")

    def remove(self, node_id: str) -> None:
        """Give back the place of a node that has ended. One in the group of all is kept for a later node."""
        group, index = self._groups.pop(node_id)
        bundle = self._bundles.pop(node_id)
        if group is self._together:
            self._spare.append((bundle, index))
        else:
            remove_placement_group(group)

    def _alone(self, node: Wanted) -> PlacementGroup:
        name = f"{self._name}/{node.node_id}"
        return placement_group([node.bundle], strategy="PACK", name=name, lifetime=self._lifetime)

    def indices(self) -> dict[str, int]:
        """By node, its index in the group of all; -1: it has a group of its own."""
        return {name: index if group is self._together else -1 for name, (group, index) in self._groups.items()}

    def of(self, node_id: str) -> tuple[PlacementGroup, int]:
        """A node's placement group, and its bundle there."""
        return self._groups[node_id]

    def there(self, node_id: str) -> bool:
        """Whether a node can be started at its place; waits for a moment. One group for all tells nothing of each
        node: Ray calls it unplaced as a whole while a host is lost."""
        group, _ = self._groups[node_id]
        return group is self._together or bool(group.wait(THERE_TIMEOUT_S))

    def close(self) -> None:
        """Give all places back; what runs there ends."""
        groups = [group for group, _ in self._groups.values()] + ([self._together] if self._together else [])
        for group in {group.id: group for group in groups}.values():
            remove_placement_group(group)


def _found(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:  # nobody has it any more
        return None


def give_all_back(name: str) -> None:
    """Give back what places there are under a name, with what runs there. Blocks."""
    for found in placement_group_table().values():
        if found["state"] != "REMOVED" and f"{found['name']}/".startswith(f"{name}/"):
            group = _found(found["name"])
            if group is not None:
                remove_placement_group(group)


def _unplaced(wanted: Sequence[Wanted], within_s: float) -> str:
    """What was asked for, and what the cluster has of it."""
    asked = Counter(node.resource for node in wanted if node.resource)
    asked[GPU] = sum(node.gpus for node in wanted)
    asked = +asked
    hosts = ray_hosts()
    there = {name: sum(host.resources.get(name, 0) for host in hosts) for name in asked}
    short = [f"{count} of {name!r} asked, {there[name]:g} there" for name, count in asked.items()]
    if 0 < there.get(GPU, 0) < asked[GPU] and max(node.gpus for node in wanted) == 1:
        short.append("--device cuda:0 lets the nodes of a host share its first GPU")
    told = "; ".join(short or ["no CPU"])
    return f"Ray could not place {len(wanted)} nodes in {within_s:g} s; {told}: {where(hosts, list(asked) or ['CPU'])}"


def ray_hosts() -> list[Host]:
    """The hosts of the cluster that Ray believes alive. Blocks."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Host(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {})) for node in alive]
