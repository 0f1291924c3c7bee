"""Which nodes serve a sequence. Pure functions of what the registry says and of what this router has under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.cost import decode_cost, prefill_cost
from cluster.registry_types import NodeRecord

NOTHING: Mapping[str, int] = {}


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


def choose_prefill(
    nodes: Sequence[NodeRecord], own: Mapping[str, int], turn: int = 0, own_tokens: Mapping[str, int] = NOTHING
) -> NodeRecord | None:
    """The prefill node for a sequence. own, own_tokens: prompts not computed yet and their tokens, by node id."""
    return cheapest(nodes, lambda node: prefill_cost(node, own.get(node.id, 0), own_tokens.get(node.id, 0)), turn)
