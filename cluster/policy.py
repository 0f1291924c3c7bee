"""Which nodes serve a sequence. Pure functions of what the registry says and of what this router has under way.

The registry's counts are up to a quarter of a lease old, so a router's own calls count when they are more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.registry_types import NodeRecord

NO_ROOM = 1e6  # cost of a decode node that would have to make the sequence wait for pages


def load(node: NodeRecord, own: int) -> float:
    """Sequences on a node. own: calls of this router in progress there."""
    return float(max(node.running + node.waiting, own))


def decode_cost(node: NodeRecord, own: int, pages: int) -> float:
    """Load, then the share of pages in use; a node without ``pages`` free ones comes last."""
    used = 1.0 - node.free_pages / node.total_pages if node.total_pages else 0.0
    short = node.total_pages > 0 and node.free_pages < pages
    return load(node, own) + used + (NO_ROOM if short else 0.0)


def cheapest(nodes: Sequence[NodeRecord], cost: Callable[[NodeRecord], float], turn: int) -> NodeRecord | None:
    """The node of least cost; ``turn`` rotates among equals. None when there is none."""
    if not nodes:
        return None
    costs = [cost(node) for node in nodes]
    best = [node for node, c in zip(nodes, costs, strict=True) if c == min(costs)]
    return best[turn % len(best)]


def choose_decode(nodes: Sequence[NodeRecord], own: Mapping[str, int], pages: int, turn: int = 0) -> NodeRecord | None:
    """The decode node for a sequence that needs ``pages`` KV pages. own: by node id."""
    return cheapest(nodes, lambda node: decode_cost(node, own.get(node.id, 0), pages), turn)


def choose_prefill(nodes: Sequence[NodeRecord], own: Mapping[str, int], turn: int = 0) -> NodeRecord | None:
    """The prefill node for a sequence."""
    return cheapest(nodes, lambda node: load(node, own.get(node.id, 0)), turn)
